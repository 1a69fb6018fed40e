"""NVIDIA's Multi-Process Service for engines on one GPU, by private daemons.

Without it processes get slices of milliseconds, so a decode step waits for a whole prefill chunk.
A client that ends with kernels in flight may break server and other clients, so they end together
(docs/operations.md).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.launcher.plan import SharedGpus
from deploy.launcher.roles import MPS_PREFILL_PERCENTAGE
from deploy.launcher.supervisor import FailureDomain
from engine.device.gpus import VISIBLE
from service.process.files import fits
from service.process.start import die_with_parent
from service.process.stop_signals import TO_GROUPS

CONTROL = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
LOG = "CUDA_MPS_LOG_DIRECTORY"
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
LONGEST_SOCKET = "control_privileged"  # created in its directory
READY_WITHIN_S = 10.0
QUIT_WITHIN_S = 5.0
ASK_TIMEOUT_S = 5.0
POLL_S = 0.05
TURNS = "the driver gives them turns of some milliseconds"


class MpsFailed(Exception):
    """The daemon did not start."""


class MpsDaemon:
    def __init__(self, control: str, *, folder: Path, gpus: Sequence[str], env: Mapping[str, str]) -> None:
        self._control = control
        self._log_path = folder / "control.out"
        self.client_env = {PIPE: str(folder)}
        others = {name: value for name, value in env.items() if name != VISIBLE}
        self._env = others | self.client_env | {LOG: str(folder)}
        if all(gpu.startswith(("GPU-", "MIG-")) for gpu in gpus):
            self._env[VISIBLE] = ",".join(gpus)  # indices would be relative to the daemon's set
        folder.mkdir(mode=0o700, exist_ok=True)
        self._process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [self._control, "-f"],
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

    def renew(self) -> str:
        """Start another in its place; return a note."""
        self.end()
        self._process = self._started()
        try:
            self.wait_ready()
        except MpsFailed as error:
            self.end()
            return f"{TURNS}: {CONTROL} (MPS) did not start again: {error}"
        return "MPS starts anew"

    def end(self) -> None:
        """Kill it, and its servers, if it does not quit."""
        if self._process.poll() is None:
            self._ask("quit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_WITHIN_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
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


@dataclass(frozen=True, slots=True)
class Sharing:
    """`env`: of engines. `notes`: for the user."""

    env: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    domains: list[FailureDomain] = field(default_factory=list)

    def with_mps(self, group: SharedGpus, daemon: MpsDaemon | None, *, percentage: int | None) -> None:
        of_daemon = {} if daemon is None else daemon.client_env
        limit = {} if percentage is None else {THREADS: str(percentage)}
        self.env.update({name: of_daemon | (limit if name in group.limited else {}) for name in group.engines})
        renew = {} if daemon is None else {"renew": daemon.renew}
        self.domains.append(FailureDomain(group.engines, what=f"GPU {', '.join(group.gpus)}", **renew))


@contextlib.contextmanager
def mps_for(groups: Sequence[SharedGpus], *, percentage: int | None, run_dir: Path) -> Iterator[Sharing]:
    """`percentage`: for `limited` engines; None: the environment's, or the default."""
    found = Sharing()
    limit = percentage or (None if THREADS in os.environ else MPS_PREFILL_PERCENTAGE)
    with contextlib.ExitStack() as daemons:
        for i, group in enumerate(groups):
            gpus = f"GPU{'s' * (len(group.gpus) > 1)} {' and '.join(group.gpus)}"
            found.notes.append(f"{' and '.join(group.engines)} share {gpus}")
            if PIPE in os.environ:
                found.with_mps(group, None, percentage=limit)
                found.notes.append(f"they use the MPS daemon of {PIPE}={os.environ[PIPE]}{_limited(group, limit)}")
                continue
            try:
                daemon = _daemon_of(group, run_dir / f"mps-{i}")
            except MpsFailed as error:
                found.notes.append(f"{TURNS}: {error}")
                continue
            daemons.callback(daemon.end)
            found.with_mps(group, daemon, percentage=limit)
            found.notes.append(f"they run side by side, by MPS{_limited(group, limit)}")
        yield found


def _limited(group: SharedGpus, percentage: int | None) -> str:
    names = " and ".join(sorted(group.limited))
    return f"; {names}: at most {percentage} % of the multiprocessors" if names and percentage is not None else ""


def _daemon_of(group: SharedGpus, folder: Path) -> MpsDaemon:
    """Raises MpsFailed."""
    control = shutil.which(CONTROL)
    if control is None:
        raise MpsFailed(f"{CONTROL} (MPS) is not on PATH")
    if not fits(folder / LONGEST_SOCKET):
        raise MpsFailed(f"{folder} is too long for the sockets of MPS; give a shorter --run-dir")
    daemon = MpsDaemon(control, folder=folder, gpus=group.gpus, env=os.environ)
    try:
        daemon.wait_ready()
    except MpsFailed as error:
        daemon.end()
        raise MpsFailed(f"{CONTROL} (MPS) did not start: {error}") from None
    return daemon
