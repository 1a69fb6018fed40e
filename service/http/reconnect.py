"""How a client goes on with a stream that broke off: what router and worker say about it, and what a worker keeps of a stream. Pure.

    router -> worker   KEEP_HEADER: keep this stream for `Keep.window_s` after its end, for one owner and one body
    worker -> client   "id:" of each event: TAG-UNIT, or TAG-UNIT.EVENT where a unit has several events
    client -> router   the same request again, with its X-Request-Id and Last-Event-ID
    router -> worker   KEPT_PATH: `KeptQuestion`, which names that event; the answer is what the client lacks of its unit, and a `Resume`

So whichever router is asked, and whether the first one lives, the answer goes on as after the loss of a worker (service/http/resume.py). The
worker computes nothing for a client that is away. `TAG` is of one worker's part of the answer: units of another one may be cut elsewhere.
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
KEPT_PATH = "/kept_stream"
MOST_KEPT_BYTES = 64 << 20  # of all ended streams of a process
OVERHEAD_BYTES = 512  # of a stream, beside its frames

_EVENT_ID = re.compile(r"([0-9a-f]{8,32})-(\d{1,9})(?:\.(\d{1,4}))?")


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """`owner`: the name of the client's key; `body`: the digest of the request."""

    window_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    owner: Name
    body: Name


class KeptQuestion(msgspec.Struct, frozen=True, kw_only=True):
    request_id: Name
    owner: Name
    body: Name
    after: Name


class KeptRest(msgspec.Struct, frozen=True, kw_only=True):
    """`events`: of a unit of which the client has a part. `resume`: the JSON text of a `Resume`, behind them."""

    events: bytes
    resume: bytes


@dataclass(eq=False, kw_only=True)
class StreamLog:
    """The frames of a stream so far. `end` stops it at its worker. `head`: begin frame, and what another worker had said."""

    tag: str
    request_id: str
    keep: Keep
    head: bytes
    end: Callable[[], None]
    is_whole: bool = True  # False: it became too long
    has_ended: bool = False
    _frames: bytearray = field(default_factory=bytearray)
    _ends: "array[int]" = field(default_factory=lambda: array("Q"))  # of units, in `_frames`
    _several: dict[int, list[bytes]] = field(default_factory=dict)  # unit -> its events, of units that have several
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.num_bytes = OVERHEAD_BYTES + len(self.head)

    def add(self, frames: bytes, events: list[bytes]) -> list[bytes]:
        """Keep the frames of a unit; return its events with their ids."""
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
        """It is too long to be kept."""
        self.is_whole = False
        self._frames.clear()
        self._several.clear()
        self.num_bytes = OVERHEAD_BYTES

    def rest_after(self, unit: int, event: int | None) -> KeptRest | None:
        """Return the bytes behind the event that the client has; None: the event is not known here."""
        if not self.is_whole or not 1 <= unit <= len(self._ends):
            return None
        record = FrameRecord()
        record.take_head(self.head + bytes(self._frames[: self._ends[unit - 1]]))
        resume = record.resume()
        if resume is None:
            return None
        events = self._several.get(unit, []) if event is not None else []
        return KeptRest(events=b"".join(events[0 if event is None else event + 1 :]), resume=resume)

    def _named(self, event: bytes, unit: int, number: int | None) -> bytes:
        """Server-sent events end with an empty line."""
        name = b"%d" % unit if number is None else b"%d.%d" % (unit, number)
        return b"%sid: %s-%s\n\n" % (event[:-1], self.tag.encode(), name)


class StreamLogs:
    """The kept streams of a process, by tag. `now_s`: seconds of any clock."""

    def __init__(self, *, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._streams: OrderedDict[str, StreamLog] = OrderedDict()
        self._due_s: dict[str, float] = {}  # of those that have ended, in that order
        self._ended_bytes = 0  # of these

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_bytes(self) -> int:
        return sum(stream.num_bytes for stream in self._streams.values())

    def open(self, stream: StreamLog) -> None:
        self._streams[stream.tag] = stream

    def ended(self, stream: StreamLog, now_s: float) -> None:
        """Keep it for as long as its window; the oldest ended ones go first when there are too many."""
        stream.has_ended = True
        self._ended_bytes += stream.num_bytes
        self._due_s[stream.tag] = now_s + stream.keep.window_s
        self.forget_old(now_s)
        self._make_room()

    def forget_old(self, now_s: float) -> float | None:
        """Forget those whose window is over; return when the next one's is."""
        for tag in [tag for tag, due_s in self._due_s.items() if due_s <= now_s]:
            self._drop(tag)
        return min(self._due_s.values(), default=None)

    def rest(self, question: KeptQuestion, now_s: float) -> KeptRest | None:
        """Answer a router; a stream that still runs ends here. None: there is no such stream of that owner and body."""
        self.forget_old(now_s)
        found = _EVENT_ID.fullmatch(question.after)
        stream = None if found is None else self._streams.get(found[1])
        if found is None or stream is None:
            return None
        if (stream.request_id, stream.keep.owner, stream.keep.body) != (
            question.request_id,
            question.owner,
            question.body,
        ):
            return None
        rest = stream.rest_after(int(found[2]), None if found[3] is None else int(found[3]))
        if rest is not None and not stream.has_ended:
            stream.end()
        return rest

    def _make_room(self) -> None:
        while self._ended_bytes > self._most_bytes:
            self._drop(next(iter(self._due_s)))

    def _drop(self, tag: str) -> None:
        del self._due_s[tag]
        self._ended_bytes -= self._streams.pop(tag).num_bytes
