"""A worker's heartbeats as routers read them: lines of an answer that does not end. Pure.

    router -> worker   GET PATH?every=SECONDS
    worker -> router   every SECONDS     first: the time between two lines, at least EVERY_S
                       idle              all is well; nothing runs, and nothing has run since the line before
                       live [SECONDS]    something runs; for so long the present step has
                       ask               /health says what is the matter

A line says that each process of the worker has run since the line before: while one is frozen none comes. A step may last.

All processes of a machine wake at the same times of its clock (`wait_s`), and a router reads the lines of all workers at once: what a
rest costs is wake-ups.
"""

from dataclasses import dataclass

PATH = "/heartbeats"
TYPE = "text/x-tandem-heartbeats"
EVERY_S = 0.25
LONGEST_S = 60.0  # between two lines
IDLE, ASK = b"idle\n", b"ask\n"
SHOWN_S = 1.0  # a shorter step is not named
_EVERY, _LIVE = b"every ", b"live"
_MOST_BYTES = 4096  # of lines that came together


STAMPS, LINES = 0.0, 0.5  # phases: a line's stamps are half a period old


class NoHeartbeats(ValueError):
    """These bytes are no heartbeats."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A line. `rests`: nothing has run since the line before. `busy_s`: of the present step; None: it is short, or there is none."""

    fine: bool
    rests: bool = False
    busy_s: float | None = None


_RESTS = [Beat(fine=True, rests=True)]


def wait_s(now_s: float, every_s: float, *, phase: float) -> float:
    """Return the time to the next turn of what happens every `every_s` of the machine's clock, but for one that is just due."""
    left_s = (phase - now_s / every_s) % 1.0 * every_s
    return left_s if left_s > every_s / 2 else left_s + every_s


def first_line(every_s: float) -> bytes:
    return _EVERY + f"{every_s:g}\n".encode()


def live_line(busy_s: float) -> bytes:
    return _LIVE + (f" {busy_s:.1f}\n".encode() if busy_s >= SHOWN_S else b"\n")


class HeartbeatReader:
    """Reads one stream. `every_s`: what its first line says; 0: it has not come."""

    def __init__(self) -> None:
        self.every_s = 0.0
        self._rest = b""

    def read(self, data: bytes) -> list[Beat]:
        """Return the lines that `data` completes, but for the first. Raises NoHeartbeats."""
        if data == IDLE and self.every_s and not self._rest:  # of most workers, most of the time
            return _RESTS
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_BYTES or len(lines) > _MOST_BYTES:
            raise NoHeartbeats("a line does not end")
        if lines and not self.every_s:
            self.every_s = _seconds(lines.pop(0).removeprefix(_EVERY))
            if not 0 < self.every_s <= LONGEST_S:
                raise NoHeartbeats("the first line names no time")
        return [_beat(line) for line in lines]


def _beat(line: bytes) -> Beat:
    """A word that is not known here is that of a later version: asking is never wrong."""
    word, _, busy = line.partition(b" ")
    if word == IDLE[:-1]:
        return Beat(fine=True, rests=True)
    return Beat(fine=True, busy_s=_seconds(busy) or None) if word == _LIVE else Beat(fine=False)


def _seconds(text: bytes) -> float:
    """0 for what is no number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e9 else 0.0
