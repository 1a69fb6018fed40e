"""Runs the real Supervisor over scripted children.

usage: launch_scripted.py LOG_DIR READY_FILE SPECS_JSON START_TIMEOUT_S DRAIN_TIMEOUT_S RESTART [SHARING_JSON]

SPECS_JSON: [[name, port, [extra arguments of scripted.py]], ...]    RESTART: always or never
SHARING_JSON: names of those that share a GPU, by MPS
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.launcher.display import make_display
from deploy.launcher.mps import Sharing, mps_for
from deploy.launcher.plan import ProcessSpec, SharedGpus
from deploy.launcher.process import Child
from deploy.launcher.supervisor import RestartPolicy, Supervisor
from service.process.files import write_ready_file

SCRIPT = Path(__file__).with_name("scripted.py")


async def run(
    log_dir: Path, ready_file: str, specs: list[ProcessSpec], times_s: tuple[float, float], restart: str, mps: Sharing
) -> int:
    def write_ready(children: Sequence[Child]) -> None:
        write_ready_file(ready_file, {child.spec.name: child.pid for child in children})

    supervisor = Supervisor(
        specs,
        log_dir=log_dir,
        display=make_display(),
        start_timeout_s=times_s[0],
        drain_timeout_s=times_s[1],
        restarts=RestartPolicy(always=restart == "always", first_s=0.01, front_tries=2),
        on_again=write_ready,
        domains=mps.domains,
    )

    async def on_ready(children: Sequence[Child]) -> None:
        write_ready(children)

    return await supervisor.run(on_ready)


def main() -> int:
    log_dir, ready_file, text, timeout_s, drain_s, restart, *sharing = sys.argv[1:]
    specs = [
        ProcessSpec(
            name=name,
            role="router" if name == "router" else "decode",
            argv=(sys.executable, str(SCRIPT), str(port), *extra),
            url=f"http://127.0.0.1:{port}",
        )
        for name, port, extra in json.loads(text)
    ]
    groups = [SharedGpus(gpus=("GPU-a",), engines=tuple(json.loads(names)), limited=frozenset()) for names in sharing]
    with mps_for(groups, percentage=None, run_dir=Path(log_dir)) as mps:
        return asyncio.run(run(Path(log_dir), ready_file, specs, (float(timeout_s), float(drain_s)), restart, mps))


if __name__ == "__main__":
    sys.exit(main())
