"""The processes of a test cluster, however they die: each is marked, so that whatever they leave behind is found.

Owns a temporary directory that all of them use (ipc directories appear there) and remembers the shared-memory segments
that they mapped. Knows nothing of what the parts are to each other.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from service.process.child_process import HTTP_SERVER_VARIABLE, SERVER_VARIABLE
from service.security.keys import ROUTER_SECRET
from tests.e2e.client import left_over
from tests.e2e.cluster import SECRET, end_tree, wait_until
from tests.e2e.ranks.leaders import Leader, start_process
from tools.family import family

UNFORKED = {
    SERVER_VARIABLE: "",
    HTTP_SERVER_VARIABLE: "",
}  # what `ps` shows of a forked process's environment has no mark
MARK = "TANDEM_FAULTS_RIG"
ROOT = Path(__file__).resolve().parents[2]
LEFT_S = SETTLE_S = 60.0
State = dict[str, Any]  # what GET /check says


@dataclass
class Part:
    """One process as its user starts it (a worker has children). `health`: a path, where it writes no ready file."""

    name: str
    process: Leader
    url: str
    ready: Path
    log: Path
    health: str | None = None

    def tree(self) -> list[psutil.Process]:
        return family(self.process.pid)

    def child(self, word: str) -> psutil.Process:
        (found,) = [p for p in self.tree()[1:] if any(word in arg for arg in p.cmdline())]
        return found

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def is_ready(self) -> bool:
        assert self.alive, f"{self.name} ended: {self.log.read_text()[-4000:]}"
        if self.health is None:
            return self.ready.exists()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + self.health).status_code == 200
        return False

    def is_routable(self) -> bool:
        """Whether a router has found its workers."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/readiness").status_code == 200
        return False

    def check(self) -> State:
        answer = httpx.get(f"{self.url}/check", timeout=20.0)
        assert answer.status_code == 200, f"{self.name}: {answer.text}"
        return json.loads(answer.text)  # type: ignore[no-any-return]

    def log_tail(self, num_bytes: int = 200_000) -> bytes:
        with self.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - num_bytes))
            return log.read()


@dataclass
class Household:
    """`close()` must be called; it ends all, and says what was left behind."""

    parts: dict[str, Part] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tf-")))
    _segments: set[str] = field(default_factory=set)
    _pids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.temp = self.folder / "t"
        self.temp.mkdir()

    def begin(
        self,
        name: str,
        args: Sequence[str],
        *,
        url: str,
        env: Mapping[str, str] | None = None,
        health: str | None = None,
        before: Sequence[str] = (),
    ) -> Part:
        """`before... python -m deploy args`; a part of that name that was there before must have ended."""
        assert name not in self.parts or not self.parts[name].alive, f"{name} still runs"
        ready, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        ready.unlink(missing_ok=True)
        common = {
            **UNFORKED,
            MARK: self.mark,
            ROUTER_SECRET: SECRET,
            "TMPDIR": str(self.temp),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        own = () if health else ("--ready-file", str(ready))
        command = [*before, sys.executable, "-m", "deploy", *args, *own]
        process = start_process(command, log, {**common, **(env or {})})
        self.parts[name] = Part(name, process, url, ready, log, health)
        return self.parts[name]

    def marked(self) -> list[psutil.Process]:
        """Every living process of ours, wherever it hangs in the process tree."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def note_segments(self) -> None:
        """Remember the shared-memory segments that our processes have mapped by now."""
        for process in self.marked():
            self._pids.add(process.pid)
            self._segments |= _segments_of(process.pid)

    def left_behind(self, *, within_s: float = LEFT_S) -> list[str]:
        """Processes, ipc directories and segments that belong to no living part; [] in good time when all is well."""
        deadline_s = time.monotonic() + within_s
        while (left := self._left()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        living = [part for part in self.parts.values() if part.alive]
        ours = {p.pid for part in living for p in part.tree()}
        left = [f"process {p.pid} {_words(p)}" for p in self.marked() if p.pid not in ours]
        leaders = {part.process.pid for part in living}
        folders = self.temp.glob("tandem-*")
        left += [f"directory {folder.name}" for folder in folders if int(folder.name.split("-")[2]) not in leaders]
        mapped = set[str]().union(*(_segments_of(pid) for pid in ours))
        left += [f"segment {name}" for name in sorted(self._segments - mapped) if Path(name).exists()]
        return left + [f"SysV segment of process {pid}" for pid in _sysv_owners() if pid in self._pids - ours]

    def show_logs(self) -> None:
        """Print the ends of all logs that say something."""
        for part in self.parts.values():
            if text := part.log_tail(3000).decode(errors="replace"):
                print(f"---- {part.name}\n{text}", file=sys.stderr, flush=True)

    def close(self) -> list[str]:
        """End all parts as their user does; what is left behind then."""
        for part in self.parts.values():
            for process in part.tree():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)
        self.note_segments()
        for part in reversed(self.parts.values()):
            end_tree(part.process)
        left = self.left_behind()
        shutil.rmtree(self.folder, ignore_errors=True)
        return left


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[-80:]
    return "(gone)"


def _segments_of(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[5] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return set()


def _sysv_owners() -> list[int]:
    """Who made the SysV segments that exist (proc(5): the fifth column)."""
    return [int(line.split()[4]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]


async def until(is_so: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> None:
    await asyncio.to_thread(wait_until, is_so, within_s=within_s, what=what)


async def unclean(
    parts: Iterable[Part], *, within_s: float = SETTLE_S, but: Callable[[State], State] = dict
) -> list[str]:
    """Which of the workers do not come to rest, and why. `but`: their states without what may be left."""
    problems = []
    for part in parts:
        try:
            await until(lambda part=part: left_over(but(part.check())) is None, within_s, part.name)  # type: ignore[misc]
        except AssertionError:
            state = part.check()
            problems.append(f"{part.name} is not clean: {left_over(but(state))}: {str(state)[:400]}")
    return problems
