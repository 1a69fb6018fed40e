"""Continuation of an answer at another worker: a worker's frames, and a router's `Resume`.

On request (FRAMES_HEADER) a worker writes frames, lines before their event:

    :begin {"id": ..., "created": ..., "seeds": [...], "salt": ...}    before the first event
    :unit BYTES                      BYTES of frames and events follow; all count, or none
    :ids INDEX ID,ID,...             tokens of a sample that this event is the first to contain
    :logprobs INDEX BASE64           logprobs of the tokens, if each event has all of them
    :prompt INDEX BASE64             logprobs of the prompt
    :end INDEX {"kind": ...}         the sample ends with this event
    :events COUNT                    with this one, if the API numbers events
    :last                            all samples ended before this event
    :failed STATUS RETRY_AFTER       this event (or body) is a final error; 0: no retry time
    :whole                           last line: the client had all events before
    :moved {"INDEX": {"control": ..., "incarnation": ...}, ...}    last line: samples migrated;
                                     their KV waits there

Server-sent events have them as comments, long whole answers in units before the body (FRAMES_TYPE).
The router removes and records them.

After a loss the router sends the request elsewhere with a field "resume", ignored unless signed in
RESUME_HEADER.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from service.security import keys as secrets

FRAMES_HEADER = "X-Tandem-Frames"
FRAMES_TYPE = "application/x-tandem-frames"
RESUME_HEADER = "X-Tandem-Resume"
RESUME_FIELD = "resume"
MOVE_OUT = "/move_out"  # route of a decode worker that migrates answers to others
MOST_FRAME_BYTES = 8 << 20  # per request: about a million tokens; longer answers are not resumed

_BEGIN, _UNIT, _IDS, _LOGPROBS, _PROMPT = b":begin ", b":unit ", b":ids ", b":logprobs ", b":prompt "
_END, _EVENTS, _FAILED, _MOVED = b":end ", b":events ", b":failed ", b":moved "
_WHOLE = b":whole\n"
LAST_FRAME = b":last\n"
MAX_NAME_CHARS = 512

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Address = Annotated[str, msgspec.Meta(max_length=300)]


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's choices, by sample. `groups`: to abort it by. `salt`: for later ids."""

    id: Name
    created: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    names: list[Name]
    groups: list[Name]
    seeds: list[Int64]
    salt: Annotated[str, msgspec.Meta(max_length=64)]


class SampleSource(msgspec.Struct, frozen=True, kw_only=True):
    """A decode worker with a sample's KV."""

    control: Address
    incarnation: Address


class Resume(Begun, frozen=True, kw_only=True):
    """The client's part of an answer.

    By sample: `output_ids`; `ended`, as the worker wrote it; logprobs in pieces; `sources` of the
    KV of all tokens but the last, else prefill computes it. `has_last`: also what follows all ends.
    """

    output_ids: list[list[TokenId]]
    ended: list[list[Any] | None]
    logprobs: list[list[str]]
    prompt_logprobs: list[list[str]]
    num_events: Annotated[int, msgspec.Meta(ge=0, lt=2**40)] = 0
    has_last: bool = False
    sources: list[SampleSource | None] = []


def sign(secret: bytes, resume: bytes) -> str:
    return secrets.sign(resume, secret, purpose="resume")


def is_signed(signature: str, secret: bytes | None, resume: bytes) -> bool:
    return secrets.is_signed(signature, resume, secret, purpose="resume")


def begin_frame(begun: Begun) -> bytes:
    return _BEGIN + msgspec.json.encode(begun) + b"\n"


def ids_frame(index: int, ids: Sequence[int]) -> bytes:
    return b":ids %d %s\n" % (index, b",".join(b"%d" % i for i in ids))


def logprobs_frame(index: int, packed: bytes, *, of_prompt: bool = False) -> bytes:
    return (_PROMPT if of_prompt else _LOGPROBS) + b"%d %s\n" % (index, base64.b64encode(packed))


def end_frame(index: int, how: bytes) -> bytes:
    """The frame; `how` is a JSON list."""
    return b":end %d %s\n" % (index, how)


def events_frame(count: int) -> bytes:
    return _EVENTS + b"%d\n" % count


def failed_frame(status: int, retry_after_s: int | None = None) -> bytes:
    return _FAILED + b"%d %d\n" % (status, retry_after_s or 0)


def known_frames(resume: "Resume") -> bytes:
    frames = begin_frame(Begun(**{name: getattr(resume, name) for name in Begun.__struct_fields__}))
    for index, ids in enumerate(resume.output_ids):
        frames += ids_frame(index, ids) if ids else b""
        frames += b"".join([_PROMPT + b"%d %s\n" % (index, piece.encode()) for piece in resume.prompt_logprobs[index]])
        frames += b"".join([_LOGPROBS + b"%d %s\n" % (index, piece.encode()) for piece in resume.logprobs[index]])
        if (how := resume.ended[index]) is not None:
            frames += end_frame(index, msgspec.json.encode(how))
    frames += events_frame(resume.num_events) if resume.num_events else b""
    return frames + (LAST_FRAME if resume.has_last else b"")


def moved_frame(sources: Mapping[int, SampleSource | None]) -> bytes:
    """The frame and an event's empty line."""
    return _MOVED + msgspec.json.encode(sources) + b"\n\n"


def whole_frame() -> bytes:
    """The frame and an empty line, as an empty stream would count as lost."""
    return _WHOLE + b"\n"


def unit_of(events: bytes) -> bytes:
    """Join events and frames of one output."""
    return _UNIT + b"%d\n%s" % (len(events), events)


@dataclass(eq=False)
class FrameRecord:
    """`failed`: status of a final error. `moved`: migrated samples."""

    failed: int = 0
    retry_after_s: int = 0
    last_event: bytes = b""
    moved: Mapping[int, SampleSource | None] = field(default_factory=dict)
    _begin: bytes = b""
    _ids: list[bytes] = field(default_factory=list)
    _logprobs: list[bytes] = field(default_factory=list)  # of tokens and prompts
    _ended: dict[int, bytes] = field(default_factory=dict)
    _num_events: int = 0
    _has_last: bool = False
    _rest: bytes = b""  # start of a unit
    _num_bytes: int = 0

    def take(self, events: bytes) -> bytes:
        """Return whole events; record frames and errors. Units wait until complete."""
        if self._rest:
            events, self._rest = self._rest + events, b""
        if b"\n:" in events or (events.startswith(b":") and not events.startswith(_IDS)):
            return self._take_lines(self._before_frames(events))
        if not events.startswith(b":"):
            return events
        end = events.index(b"\n") + 1  # usually one frame before one event
        if end == len(events):
            self._rest = events
            return b""
        self._keep(self._ids, events[:end])
        return events[end:]

    def _before_frames(self, events: bytes) -> bytes:
        """Hold back final frames, whose event may follow in a line stream."""
        end = len(events)
        while (at := events.rfind(b"\n", 0, end - 1) + 1) < end and events.startswith(b":", at):
            end = at
        self._rest = events[end:]
        return events[:end]

    def take_head(self, data: bytes) -> bytes:
        """The rest after a whole answer's frames: body or partial frame."""
        while data.startswith(b":") and (end := data.find(b"\n") + 1):
            line = data[:end]
            if line.startswith(_UNIT) and len(data) - end < int(line[len(_UNIT) :]):
                break
            data = data[end:]
            if line.startswith(_FAILED):
                self._fail(line)
            elif line.startswith(_MOVED):
                self._move(line)
                return b""
            else:
                self._take_frame(line)
        return data

    def _fail(self, line: bytes) -> None:
        self.failed, self.retry_after_s = map(int, line[len(_FAILED) :].split())

    def _move(self, line: bytes) -> None:
        self.moved = msgspec.json.decode(line[len(_MOVED) :], type=dict[int, SampleSource | None])

    def restart(self) -> None:
        self.failed, self.moved = 0, {}

    def drop_rest(self) -> None:
        self._rest = b""

    def _keep(self, kept: list[bytes], line: bytes) -> None:
        self._num_bytes += len(line)
        if self._num_bytes <= MOST_FRAME_BYTES:
            kept.append(line)

    def _take_lines(self, events: bytes) -> bytes:
        kept, at = [], 0
        while at < len(events):
            end = events.find(b"\n", at) + 1 or len(events)
            line = events[at:end]
            if line.startswith(_UNIT) and len(events) - end < int(line[len(_UNIT) :]):
                self._rest = events[at:] + self._rest
                break
            if line.startswith(_FAILED):
                self._fail(line)
                self.last_event = events[end:]
                break
            if line.startswith(_MOVED):
                self._move(line)
                break
            if line == _WHOLE:
                break
            if not self._take_frame(line):
                kept.append(line)
            at = end
        return b"".join(kept)

    def _take_frame(self, line: bytes) -> bool:
        if line.startswith(_IDS):
            self._keep(self._ids, line)
        elif line.startswith((_LOGPROBS, _PROMPT)):
            self._keep(self._logprobs, line)
        elif line.startswith(_END):
            index, _, how = line[len(_END) :].partition(b" ")
            self._ended[int(index)] = how
        elif line.startswith(_BEGIN):
            self._begin = line
        elif line.startswith(_EVENTS):
            self._num_events = int(line[len(_EVENTS) :])
        elif line == LAST_FRAME:
            self._has_last = True
        else:
            return line.startswith(_UNIT)
        return True

    def can_resume(self) -> bool:
        return bool(self._begin) and self._num_bytes <= MOST_FRAME_BYTES

    def num_tokens(self) -> int:
        return sum(line.count(b",") + 1 for line in self._ids)

    def samples_left(self) -> dict[int, str]:
        """Unfinished samples' names by index."""
        if not self._begin:
            return {}
        names = msgspec.json.decode(self._begin[len(_BEGIN) :], type=Begun).names
        return {index: name for index, name in enumerate(names) if index not in self._ended}

    def has_sources(self) -> bool:
        left = self.samples_left()
        return bool(left) and all(self.moved.get(index) is not None for index in left)

    def resume(self, *, by_kv: bool = False) -> bytes | None:
        """The next worker's `Resume`, if possible. `by_kv`: with sources."""
        if not self.can_resume():
            return None
        begun = msgspec.json.decode(self._begin[len(_BEGIN) :], type=Begun)
        samples = range(len(begun.seeds))
        output_ids: list[list[int]] = [[] for _ in samples]
        for line in self._ids:
            index, _, ids = line[len(_IDS) :].partition(b" ")
            output_ids[int(index)] += map(int, ids.split(b","))
        return msgspec.json.encode(
            Resume(
                **msgspec.structs.asdict(begun),
                output_ids=output_ids,
                ended=[msgspec.json.decode(self._ended[i]) if i in self._ended else None for i in samples],
                logprobs=self._pieces(_LOGPROBS, len(samples)),
                prompt_logprobs=self._pieces(_PROMPT, len(samples)),
                num_events=self._num_events,
                has_last=self._has_last,
                sources=[self.moved.get(i) for i in samples] if by_kv else [],
            )
        )

    def _pieces(self, kind: bytes, num_samples: int) -> list[list[str]]:
        pieces: list[list[str]] = [[] for _ in range(num_samples)]
        for line in self._logprobs:
            if line.startswith(kind):
                index, _, piece = line[len(kind) :].partition(b" ")
                pieces[int(index)].append(piece.rstrip().decode())
        return pieces
