"""NVIDIA's Multi-Process Service for engines on one GPU, by a private daemon.

Without it processes get slices of milliseconds, so a decode step waits for a whole prefill chunk.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.device.gpus import VISIBLE
from service.process.files import fits
from service.process.start import die_with_parent
from service.process.stop_signals import TO_GROUPS

CONTROL = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
LOG = "CUDA_MPS_LOG_DIRECTORY"
LONGEST_SOCKET = "control_privileged"  # created in its directory
READY_WITHIN_S = 10.0
QUIT_WITHIN_S = 5.0
ASK_TIMEOUT_S = 5.0
POLL_S = 0.05


class MpsFailed(Exception):
    """The daemon did not start."""


class MpsDaemon:
    """A control daemon in `folder`."""

    def __init__(self, control: str, *, folder: Path, gpus: Sequence[str], env: Mapping[str, str]) -> None:
        self._control = control
        self._log_path = folder / "control.out"
        self.client_env = {PIPE: str(folder)}
        self._env = (
            {name: value for name, value in env.items() if name != VISIBLE} | self.client_env | {LOG: str(folder)}
        )
        if all(gpu.startswith(("GPU-", "MIG-")) for gpu in gpus):
            self._env[VISIBLE] = ",".join(gpus)  # indices would be relative to the daemon's set
        folder.mkdir(mode=0o700, exist_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [control, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=self._env,
                preexec_fn=die_with_parent(ignored=TO_GROUPS),
            )

    def wait_ready(self) -> None:
        """Raises MpsFailed."""
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not self._ask("get_server_list"):
            if self._process.poll() is not None:
                raise MpsFailed(self._last_line() or f"exit status {self._process.returncode}")
            if time.monotonic() > deadline_s:
                raise MpsFailed(f"no answer within {READY_WITHIN_S:g} s")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill it if it does not quit."""
        if self._process.poll() is None:
            self._ask("quit")
        try:
            self._process.wait(QUIT_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: str) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [self._control],
                input=f"{command}\n",
                env=self._env,
                capture_output=True,
                text=True,
                timeout=ASK_TIMEOUT_S,
                check=False,
            )
            return done.returncode == 0
        return False

    def _last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextlib.contextmanager
def mps_for(shared: Mapping[str, Sequence[str]], *, run_dir: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the engines' environment, and notes for the user."""
    if not shared:
        yield {}, []
        return
    lines = [f"{' and '.join(names)} share GPU {gpu}" for gpu, names in shared.items()]
    control = shutil.which(CONTROL)
    if PIPE in os.environ:
        yield {}, [*lines, f"they use the MPS daemon of {PIPE}={os.environ[PIPE]}"]
        return
    if control is None:
        yield {}, [*lines, f"the driver gives them turns of some milliseconds: {CONTROL} (MPS) is not on PATH"]
        return
    folder = run_dir / "mps"
    if not fits(folder / LONGEST_SOCKET):
        too_long = f"{folder} is too long for the sockets of MPS; give a shorter --run-dir"
        yield {}, [*lines, f"the driver gives them turns of some milliseconds: {too_long}"]
        return
    daemon = MpsDaemon(control, folder=folder, gpus=list(shared), env=os.environ)
    try:
        daemon.wait_ready()
    except MpsFailed as error:
        daemon.end()
        yield {}, [*lines, f"the driver gives them turns of some milliseconds: {CONTROL} (MPS) did not start: {error}"]
        return
    try:
        yield daemon.client_env, [*lines, "they run side by side, by MPS"]
    finally:
        daemon.end()
