"""A real cluster for a test: `tandem up` as its users start it, real processes, sockets and transfer engines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

READY_S = 120.0
END_S = 15.0
SETTLE_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True)
class Worker:
    role: str
    url: str
    pid: int


@dataclass(frozen=True)
class Cluster:
    """`router`: where requests go (with --unified, the worker itself)."""

    router: str
    workers: tuple[Worker, ...]
    launcher: subprocess.Popen[bytes]
    log: Path

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]


@contextlib.contextmanager
def cluster(folder: Path, *args: str) -> Iterator[Cluster]:
    """Start, wait until healthy, and end every process however the test went."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "ready.json", folder / "up.log"
    command = [sys.executable, "-m", "deploy", "up", "--port", "0", "--ready-file", str(ready), *args]
    with log.open("wb") as out:
        launcher = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        info = _wait_for(ready, launcher, log)
        workers = tuple(Worker(w["role"], w["url"], w["pid"]) for w in info["workers"])
        yield Cluster(info["router"], workers, launcher, log)
    finally:
        _end(launcher)


def _wait_for(ready: Path, launcher: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        if ready.exists():
            return json.loads(ready.read_text())  # type: ignore[no-any-return]
        assert launcher.poll() is None, f"tandem up ended: {log.read_text()}"
        time.sleep(POLL_S)
    raise AssertionError(f"not ready within {READY_S} s: {log.read_text()}")


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then whatever is left of its process tree by force."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(launcher.pid).children(recursive=True)
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(END_S)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if launcher.poll() is None:
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
