"""Reconnection of a client to its broken stream.

    router -> worker   KEEP_HEADER: retain this stream for `Keep.window_s`, for one owner and body
    worker -> client   "id:" of each event: TAG-UNIT, or TAG-UNIT.EVENT if a unit has several
    client -> router   the same request again, with its X-Request-Id and Last-Event-ID
    router -> worker   RETAINED_PATH: `RetainedQuestion` with that event; the answer is the rest of
                       its unit and a `Resume`

So any router can continue (resume.py). `TAG` is of one worker's part, as others may divide units
differently.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from service.http.resume import MOST_FRAME_BYTES, FrameRecord, Name

KEEP_HEADER = "X-Tandem-Keep"
LAST_EVENT_HEADER = "Last-Event-ID"
RETAINED_PATH = "/kept_stream"
MAX_KEPT_BYTES = 64 << 20  # ended streams of a process
OVERHEAD_BYTES = 512  # per stream, in addition to its frames

_EVENT_ID = re.compile(r"([0-9a-f]{8,32})-(\d{1,9})(?:\.(\d{1,4}))?")


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Retention of a stream, for one key (`owner`) and one body (a digest)."""

    window_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    owner: Name
    body: Name


class RetainedQuestion(msgspec.Struct, frozen=True, kw_only=True):
    request_id: Name
    owner: Name
    body: Name
    after: Name


class RetainedRest(msgspec.Struct, frozen=True, kw_only=True):
    """The rest of a unit, and the JSON of a `Resume`."""

    events: bytes
    resume: bytes


@dataclass(eq=False, kw_only=True)
class StreamLog:
    """`head`: begin frame, and earlier workers'. `end` stops it."""

    tag: str
    request_id: str
    keep: Keep
    head: bytes
    end: Callable[[], None]
    is_whole: bool = True  # False once too long
    has_ended: bool = False
    _frames: bytearray = field(default_factory=bytearray)
    _ends: "array[int]" = field(default_factory=lambda: array("Q"))  # unit ends in `_frames`
    _several: dict[int, list[bytes]] = field(default_factory=dict)  # unit -> its events, if several
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.num_bytes = OVERHEAD_BYTES + len(self.head)

    def add(self, frames: bytes, events: list[bytes]) -> list[bytes]:
        """Retain a unit; return its events with ids."""
        unit = len(self._ends) + 1
        named = [self._named(event, unit, i if len(events) > 1 else None) for i, event in enumerate(events)]
        self._frames += frames if self.is_whole else b""
        self._ends.append(len(self._frames))
        added = len(frames) + self._ends.itemsize
        if len(events) > 1 and self.is_whole:
            self._several[unit] = named
            added += sum(map(len, named))
        self.num_bytes += added
        if self.num_bytes > MOST_FRAME_BYTES:
            self.forget()
        return named

    def forget(self) -> None:
        self.is_whole = False
        self._frames.clear()
        self._several.clear()
        self.num_bytes = OVERHEAD_BYTES

    def rest_after(self, unit: int, event: int | None) -> RetainedRest | None:
        if not self.is_whole or not 1 <= unit <= len(self._ends):
            return None
        record = FrameRecord()
        record.take_head(self.head + bytes(self._frames[: self._ends[unit - 1]]))
        resume = record.resume()
        if resume is None:
            return None
        events = self._several.get(unit, []) if event is not None else []
        return RetainedRest(events=b"".join(events[0 if event is None else event + 1 :]), resume=resume)

    def _named(self, event: bytes, unit: int, number: int | None) -> bytes:
        name = b"%d" % unit if number is None else b"%d.%d" % (unit, number)
        return b"%sid: %s-%s\n\n" % (event[:-1], self.tag.encode(), name)


class StreamLogs:
    """Retained streams by tag, on any clock."""

    def __init__(self, *, most_bytes: int = MAX_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._streams: OrderedDict[str, StreamLog] = OrderedDict()
        self._due_s: dict[str, float] = {}  # of ended streams, in order
        self._ended_bytes = 0  # of ended streams

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_bytes(self) -> int:
        return sum(stream.num_bytes for stream in self._streams.values())

    def open(self, stream: StreamLog) -> None:
        self._streams[stream.tag] = stream

    def ended(self, stream: StreamLog, now_s: float) -> None:
        """Retain an ended stream for its window; the oldest are evicted."""
        stream.has_ended = True
        self._ended_bytes += stream.num_bytes
        self._due_s[stream.tag] = now_s + stream.keep.window_s
        self.forget_old(now_s)
        while self._ended_bytes > self._most_bytes:
            self._drop(next(iter(self._due_s)))

    def forget_old(self, now_s: float) -> float | None:
        """Drop expired streams; return the next expiry."""
        for tag in [tag for tag, due_s in self._due_s.items() if due_s <= now_s]:
            self._drop(tag)
        return min(self._due_s.values(), default=None)

    def rest(self, question: RetainedQuestion, now_s: float) -> RetainedRest | None:
        """Answer a router, ending a running stream. None if unknown."""
        self.forget_old(now_s)
        found = _EVENT_ID.fullmatch(question.after)
        stream = None if found is None else self._streams.get(found[1])
        if found is None or stream is None:
            return None
        kept = (stream.request_id, stream.keep.owner, stream.keep.body)
        if kept != (question.request_id, question.owner, question.body):
            return None
        rest = stream.rest_after(int(found[2]), None if found[3] is None else int(found[3]))
        if rest is not None and not stream.has_ended:
            stream.end()
        return rest

    def _drop(self, tag: str) -> None:
        del self._due_s[tag]
        self._ended_bytes -= self._streams.pop(tag).num_bytes
