"""Liveness timestamps in shared memory, which the main frontend reads without messages.

Each other serving process (scheduler, follower, frontend) has a file of 8-byte numbers: last stamp
(ns, monotonic), start of the current iteration (0: idle), iterations with a step.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.http.heartbeats import EVERY_S, STAMPS, wait_s
from service.process.files import mapped

_PREFIX = "stamp."
_WORDS = 3
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Stamped:
    """In `time.monotonic` seconds; `busy_since_s` is None if idle."""

    name: str
    at_s: float
    busy_since_s: float | None
    num_steps: int


class Stamp:
    """`name`: of the process."""

    def __init__(self, folder: str, name: str) -> None:
        self._words = mapped(Path(folder, _PREFIX + name), 8 * _WORDS)
        self.write(time.monotonic())

    def write(self, at_s: float, *, busy_since_s: float | None = None, num_steps: int = 0) -> None:
        self._words[1], self._words[2] = int((busy_since_s or 0.0) * _NS), num_steps
        self._words[0] = int(at_s * _NS)


class Stamps:
    """Files created after the first read are ignored."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._words: dict[str, memoryview] = {}

    def read(self) -> list[Stamped]:
        if not self._words:
            paths = sorted(Path(self._folder).glob(f"{_PREFIX}*"))
            self._words = {path.name.removeprefix(_PREFIX): mapped(path) for path in paths}
        return [_stamped(name, words) for name, words in self._words.items()]

    def frozen(self, now_s: float, *, after_s: float) -> Stamped | None:
        """The oldest stamp, if older than `after_s`."""
        oldest = min(self.read(), key=lambda stamped: stamped.at_s, default=None)
        return None if oldest is None or now_s - oldest.at_s <= after_s else oldest


@contextmanager
def stamping(folder: str, name: str) -> Iterator[None]:
    """Stamp in a thread within the block."""
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
