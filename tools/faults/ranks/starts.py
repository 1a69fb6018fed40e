"""Workers of two ranks that cannot start: one message, in time, and nothing is left; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.starts [--report FILE]
"""

import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.cluster import wait_until
from tools.faults.household import Household
from tools.faults.report import Rows, rank_parser
from tools.faults.switches import switched

DIST_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Start:
    """`switch`: what the follower alone suffers. `said`: what the one line has."""

    name: str
    said: str
    switch: str | None = None


STARTS = (
    Start("no weights", "model.safetensors"),
    Start("weights cut short", "model.safetensors"),
    Start("a port is taken", "--port"),
    Start("the bootstrap port is taken", "--disaggregation-bootstrap-port"),
    Start("a follower may not read", "rank 1 of 2", "unreadable"),
    Start("a follower reads others", "rank 1 of 2", "other-weights"),
    Start("a follower never loads", "--dist-timeout: rank 1 of 2", "never-loads"),
)


def run(start: Start) -> dict[str, Any]:
    household = Household()
    switches = household.folder / "s"
    switches.mkdir()
    if start.switch is not None:
        (switches / start.switch).touch()
    taken = socket.create_server(("127.0.0.1", 0))
    began_s = time.monotonic()
    try:
        part = household.begin(
            "worker",
            ["serve", *_flags(start, household.folder, taken.getsockname()[1])],
            url="",
            env=switched(switches),
        )
        wait_until(lambda: not part.alive, within_s=4 * DIST_TIMEOUT_S, what="its end")
        took_s = time.monotonic() - began_s
        text = part.log.read_text(errors="replace")
        errors = [line for line in text.splitlines() if line.startswith("tandem serve: error: ")]
        problems = [f"left behind: {what}" for what in household.left_behind(within_s=5.0)]
        if len(errors) != 1 or start.said not in errors[0]:
            problems.append(f"says {errors}, wanted one with {start.said!r}: {text[-1500:]}")
        if not part.process.returncode:
            problems.append(f"exit status {part.process.returncode}")
    finally:
        household.close()
        taken.close()
    return {
        "said": [line.replace(str(household.folder), "") for line in errors],
        "took_s": round(took_s, 1),
        "problems": problems,
    }


def _flags(start: Start, folder: Path, taken: int) -> list[str]:
    flags = ["--tp-size", "2", "--dist-timeout", str(DIST_TIMEOUT_S), "--log-level", "warning"]
    flags += ["--max-total-tokens", "4096"]
    port, model = "0", folder / "model"
    shutil.copytree(WIDE_MODEL_PATH, model)
    if start.name == "no weights":
        (model / "model.safetensors").unlink()
    elif start.name == "weights cut short":
        whole = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif start.name == "a port is taken":
        port = str(taken)
    elif start.name == "the bootstrap port is taken":
        flags += ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(taken)]
    return [*flags, "--port", port, "--model-path", str(model)]


def main() -> int:
    rows = Rows(rank_parser("starts", "starts that fail").parse_args().report, "starts")
    for start in STARTS:
        rows.add(start.name, run(start))
    return 1 if rows.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
