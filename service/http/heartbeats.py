"""Heartbeats of a worker: lines of an endless response. Pure.

    router -> worker   GET PATH?every=SECONDS
    worker -> router   `every SECONDS`     first line: the interval, at least EVERY_S
                       `idle`              healthy; nothing has run since the last line
                       `live [SECONDS]`    requests run; duration of the present step
                       `ask`               see /health

A line proves that each process has run since the last. Common clock times (`wait_s`) save wake-ups.
"""

from dataclasses import dataclass

PATH = "/heartbeats"
TYPE = "text/x-tandem-heartbeats"
EVERY_S = 0.25
LONGEST_S = 60.0  # longest interval
IDLE, ASK = b"idle\n", b"ask\n"
SHOWN_S = 1.0  # shorter steps are not reported
_EVERY, _LIVE = b"every ", b"live"
_MAX_BYTES = 4096  # of lines in one read


STAMPS, LINES = 0.0, 0.5  # phases: a line's stamps are half a period old


class NoHeartbeats(ValueError):
    """These bytes are no heartbeats."""


@dataclass(frozen=True, slots=True)
class Beat:
    """`rests`: idle since the last. `busy_s`: of a long step."""

    fine: bool
    rests: bool = False
    busy_s: float | None = None


_RESTS = [Beat(fine=True, rests=True)]


def wait_s(now_s: float, every_s: float, *, phase: float) -> float:
    """The time to the machine's next tick of `every_s`, skipping one just due."""
    left_s = (phase - now_s / every_s) % 1.0 * every_s
    return left_s if left_s > every_s / 2 else left_s + every_s


def first_line(every_s: float) -> bytes:
    return _EVERY + f"{every_s:g}\n".encode()


def live_line(busy_s: float) -> bytes:
    return _LIVE + (f" {busy_s:.1f}\n".encode() if busy_s >= SHOWN_S else b"\n")


class HeartbeatReader:
    """Reader of one stream. `every_s` is 0 at first."""

    def __init__(self) -> None:
        self.every_s = 0.0
        self._rest = b""

    def read(self, data: bytes) -> list[Beat]:
        """Completed lines but the first. Raises NoHeartbeats."""
        if data == IDLE and self.every_s and not self._rest:  # the usual case
            return _RESTS
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_BYTES or len(lines) > _MAX_BYTES:
            raise NoHeartbeats("a line does not end")
        if lines and not self.every_s:
            self.every_s = _seconds(lines.pop(0).removeprefix(_EVERY))
            if not 0 < self.every_s <= LONGEST_S:
                raise NoHeartbeats("the first line names no time")
        return [_beat(line) for line in lines]


def _beat(line: bytes) -> Beat:
    """A later version's word requests a check."""
    word, _, busy = line.partition(b" ")
    if word == IDLE[:-1]:
        return Beat(fine=True, rests=True)
    return Beat(fine=True, busy_s=_seconds(busy) or None) if word == _LIVE else Beat(fine=False)


def _seconds(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e9 else 0.0
