"""A real cluster for a test: `tandem up` as its users start it, real processes, sockets and transfer engines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from service.security.keys import ROUTER_SECRET
from tests.e2e.ranks.leaders import Leader, start_process
from tools.family import children, family

READY_S = 120.0
END_S = 15.0
SETTLE_S = 60.0
POLL_S = 0.05
SECRET = "as `tandem up` gives its processes one"  # of routers and workers that a test starts by hand
DEAD = "--restart=never"  # what a test kills stays dead
# Flags of clusters with the shipped model.
SHIPPED = ("--max-total-tokens", "65536", "--chunked-prefill-size", "256", "--log-level", "warning")


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
    launcher: Leader
    log: Path

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]


def _by_pairs(args: Sequence[str]) -> Sequence[str]:
    """Tests are about pairs unless they name another route."""
    return () if {"--route", "--unified", "--worker-urls"} & set(args) else ("--route", "pair")


@contextlib.contextmanager
def cluster(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Start, wait until healthy, and end every process however the test went."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "ready.json", folder / "up.log"
    command = [sys.executable, "-m", "deploy", "up", "--port", "0", "--ready-file", str(ready), *args, *_by_pairs(args)]
    launcher = start_process(command, log, env)
    try:
        info = wait_ready(ready, launcher, log)
        workers = tuple(Worker(w["role"], w["url"], w["pid"]) for w in info["workers"])
        yield Cluster(info["router"], workers, launcher, log)
    finally:
        end_tree(launcher)


@dataclass(frozen=True)
class Started:
    """One `tandem serve` or `tandem router` of its own."""

    url: str
    process: Leader
    log: Path

    def child(self, name: str) -> psutil.Process:
        """The scheduler of a worker."""
        return child_of(self.process.pid, name)


def child_of(pid: int, name: str) -> psutil.Process:
    """The child of a process whose command line has `name`."""
    (found,) = [child for child in children(pid) if any(name in word for word in child.cmdline())]
    return found


@contextlib.contextmanager
def tandem(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Iterator[Started]:
    """`tandem serve ...` or `tandem router ...`, ready; ended however the test went."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "ready.json", folder / "log"
    ready.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "deploy",
        *args,
        *(_by_pairs(args) if "--pd-disaggregation" in args else ()),
        "--ready-file",
        str(ready),
    ]
    process = start_process(command, log, {ROUTER_SECRET: SECRET, **(env or {})})
    try:
        info = wait_ready(ready, process, log)
        yield Started(info.get("url") or info["router"], process, log)
    finally:
        end_tree(process)


@contextlib.contextmanager
def several(
    folder: Path, commands: Mapping[str, Sequence[str]], env: Mapping[str, str] | None = None
) -> Iterator[dict[str, Started]]:
    """Many of them by name, started at once."""
    # its threads live as long as what they started: a process ends with the thread that is its parent
    with ThreadPoolExecutor(len(commands)) as pool, contextlib.ExitStack() as stack:

        def start(name: str) -> Started:
            process = tandem(folder / name, *commands[name], env=env)
            started = process.__enter__()
            stack.push(process)
            return started

        yield dict(zip(commands, pool.map(start, commands), strict=True))


def wait_until(is_so: Callable[[], bool], *, within_s: float, what: str | Callable[[], str]) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what if isinstance(what, str) else what()}"
        time.sleep(POLL_S)


def wait_ready(ready: Path, process: Leader, log: Path) -> dict[str, Any]:
    def is_ready() -> bool:
        assert process.poll() is None, f"it ended: {log.read_text()}"
        return ready.exists()

    wait_until(is_ready, within_s=READY_S, what=lambda: f"ready: {log.read_text()}")
    return json.loads(ready.read_text())  # type: ignore[no-any-return]


def end_tree(leader: Leader) -> None:
    """SIGTERM, then whatever is left of its process tree by force."""
    relatives = family(leader.pid)[1:]
    if leader.poll() is None:
        leader.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(END_S)
    for process in relatives:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if leader.poll() is None:
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
