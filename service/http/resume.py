"""How a stream goes on at another worker: what a worker writes beside its events for a router, and what the router gives to the next.

A worker that is asked for them (FRAMES_HEADER) writes frames, lines before the event that they belong to:

    :begin {"id": ..., "created": ..., "seeds": [...], "salt": ...}    before the first event
    :ids INDEX ID,ID,...                                               tokens of a sample that this event is the first to show
    :end INDEX                                                         the sample ends with this event
    :failed STATUS                                                     this event is an error, and the last

In server-sent events such lines are comments. The router takes them out and keeps them. Where the worker is lost it sends the request to
others with a field "resume" (`Resume`), signed in RESUME_HEADER: a client cannot set it, as a worker does not read it unsigned.
The answer goes on behind the tokens that the client has: a token is the same wherever it is computed.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from service.security.secret import derive

FRAMES_HEADER = "X-Tandem-Frames"
RESUME_HEADER = "X-Tandem-Resume"
RESUME_FIELD = "resume"
MOST_FRAME_BYTES = 8 << 20  # of one request: about a million tokens; a longer answer is not resumed

_BEGIN, _IDS, _END, _FAILED = b":begin ", b":ids ", b":end ", b":failed "


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has decided for an answer. By sample: `names`, `groups` (other names to abort it by), `seeds`. `salt`: of the ids that it mints on the way."""

    id: str
    created: int
    names: list[str]
    groups: list[str]
    seeds: list[int]
    salt: str


class Resume(Begun, frozen=True, kw_only=True):
    """`output_ids`: of each sample, tokens that the client has; `ended`: whether it has the end, too."""

    output_ids: list[list[int]]
    ended: list[bool]


def sign(secret: bytes | None, resume: bytes) -> str:
    """The header's value for the JSON text of a `Resume`; without a secret workers check none."""
    return "-" if secret is None else hmac.new(derive(secret, "resume"), resume, hashlib.sha256).hexdigest()


def is_signed(signature: str, secret: bytes | None, resume: bytes) -> bool:
    return secret is None or hmac.compare_digest(signature.encode(errors="replace"), sign(secret, resume).encode())


def begin_frame(begun: Begun) -> bytes:
    return _BEGIN + msgspec.json.encode(begun) + b"\n"


def ids_frame(index: int, ids: Sequence[int]) -> bytes:
    return b":ids %d %s\n" % (index, b",".join(b"%d" % i for i in ids))


def end_frame(index: int) -> bytes:
    return b":end %d\n" % index


def failed_frame(status: int) -> bytes:
    return _FAILED + b"%d\n" % status


@dataclass(eq=False)
class FrameRecord:
    """The frames of one stream, as they came. `failed`: the status of a worker's last event, an error, and `last_event`; 0: there was none."""

    failed: int = 0
    last_event: bytes = b""
    _begin: bytes = b""
    _ids: list[bytes] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)
    _num_bytes: int = 0

    def take(self, events: bytes) -> bytes:
        """Return whole `events` without their frames and without an error, which are kept."""
        if b"\n:" in events or (events.startswith(b":") and not events.startswith(_IDS)):
            return self._take_lines(events)
        if not events.startswith(b":"):
            return events
        end = events.index(b"\n") + 1  # the usual piece: one frame before one event
        self._keep_ids(events[:end])
        return events[end:]

    def _keep_ids(self, line: bytes) -> None:
        self._num_bytes += len(line)
        if self._num_bytes <= MOST_FRAME_BYTES:
            self._ids.append(line)

    def _take_lines(self, events: bytes) -> bytes:
        kept, lines = [], events.splitlines(keepends=True)
        for at, line in enumerate(lines):
            if line.startswith(_IDS):
                self._keep_ids(line)
            elif line.startswith(_END):
                self._ended.add(int(line[len(_END) :]))
            elif line.startswith(_BEGIN):
                self._begin = line
            elif line.startswith(_FAILED):
                self.failed, self.last_event = int(line[len(_FAILED) :]), b"".join(lines[at + 1 :])
                break
            else:
                kept.append(line)
        return b"".join(kept)

    def can_resume(self) -> bool:
        return bool(self._begin) and self._num_bytes <= MOST_FRAME_BYTES

    def resume(self) -> bytes | None:
        """Return the JSON text of the `Resume` for the next worker; None: the stream cannot go on elsewhere."""
        if not self.can_resume():
            return None
        begun = msgspec.json.decode(self._begin[len(_BEGIN) :], type=Begun)
        output_ids: list[list[int]] = [[] for _ in begun.seeds]
        for line in self._ids:
            index, _, ids = line[len(_IDS) :].partition(b" ")
            output_ids[int(index)] += map(int, ids.split(b","))
        return msgspec.json.encode(
            Resume(
                id=begun.id,
                created=begun.created,
                names=begun.names,
                groups=begun.groups,
                seeds=begun.seeds,
                salt=begun.salt,
                output_ids=output_ids,
                ended=[index in self._ended for index in range(len(begun.seeds))],
            )
        )
