"""Signs of life of a worker's processes: each stamps the time into memory that its main frontend reads without a message.

A process that serves requests of the worker on this machine has a file in the worker's private directory: scheduler, follower, frontend
beside the main one. Numbers of 8 bytes, with one writer: when it was stamped (ns of the monotonic clock, which all processes share), since
when its present turn lasts (0: it rests), turns with a step so far.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.http.heartbeats import EVERY_S, STAMPS, wait_s
from service.process.shared_file import mapped

_PREFIX = "stamp."
_WORDS = 3
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Stamped:
    """The latest stamp of a process. `busy_since_s`: None: it rests. Times: of `time.monotonic`."""

    name: str
    at_s: float
    busy_since_s: float | None
    num_steps: int


class Stamp:
    """The writer. `name`: of the process, for messages."""

    def __init__(self, folder: str, name: str) -> None:
        self._words = mapped(Path(folder, _PREFIX + name), 8 * _WORDS)
        self.write(time.monotonic())

    def write(self, at_s: float, *, busy_since_s: float | None = None, num_steps: int = 0) -> None:
        self._words[1], self._words[2] = int((busy_since_s or 0.0) * _NS), num_steps
        self._words[0] = int(at_s * _NS)


class Stamps:
    """The reader of all. A file that comes later is not seen: read first when the worker is ready."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._words: dict[str, memoryview] = {}

    def read(self) -> list[Stamped]:
        """Return the last stamp of every process; of none before the first has stamped."""
        if not self._words:
            paths = sorted(Path(self._folder).glob(f"{_PREFIX}*"))
            self._words = {path.name.removeprefix(_PREFIX): mapped(path) for path in paths}
        return [_stamped(name, words) for name, words in self._words.items()]

    def frozen(self, now_s: float, *, after_s: float) -> Stamped | None:
        """Return the stamp that is oldest, if it is older than `after_s`."""
        oldest = min(self.read(), key=lambda stamped: stamped.at_s, default=None)
        return None if oldest is None or now_s - oldest.at_s <= after_s else oldest


@contextmanager
def stamping(folder: str, name: str) -> Iterator[None]:
    """Stamp from a thread of its own until the block ends."""
    stamp, ended = Stamp(folder, name), threading.Event()

    def run() -> None:
        while not ended.wait(wait_s(time.monotonic(), EVERY_S, phase=STAMPS)):
            stamp.write(time.monotonic())

    thread = threading.Thread(target=run, name="stamp", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _stamped(name: str, words: memoryview) -> Stamped:
    at_ns, busy_ns, num_steps = words
    return Stamped(name, at_ns / _NS, busy_ns / _NS if busy_ns else None, num_steps)
