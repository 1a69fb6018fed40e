"""Streams that may continue on another worker (service/http/resume.py)."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import Response

from engine.frontend.client.generation import Generation, add
from engine.frontend.services import SERVICES, Services
from engine.messages import FinishReason, GenerateRequest, KVSource, TokenLogprob, TokenOutput
from engine.text.sample import TextOutput
from service.http.errors import ApiError, bad_field, decode_or_none
from service.http.reconnect import StreamLog
from service.http.request import HttpRequest, RequestKey, StreamedResponse
from service.http.resume import (
    FRAMES_HEADER,
    FRAMES_TYPE,
    LAST_FRAME,
    RESUME_FIELD,
    RESUME_HEADER,
    Begun,
    Resume,
    SampleSource,
    begin_frame,
    end_frame,
    events_frame,
    failed_frame,
    ids_frame,
    is_signed,
    logprobs_frame,
    moved_frame,
    unit_of,
    whole_frame,
)
from service.http.routes import errors_of, json_response, open_stream

NOT_SIGNED = "only a router with the worker's --cluster-secret-file may do this"
UNKNOWN_WORDS = "is not what a router of this version writes; upgrade routers and workers together"

_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprob]).decode


class MintedIds:
    """Unguessable ids that another worker can repeat, from a secret salt, in order."""

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self._count = 0

    def mint(self, prefix: str) -> str:
        self._count += 1
        return prefix + hashlib.blake2b(self._count.to_bytes(8), key=self.salt.encode(), digest_size=16).hexdigest()


_RESUME: RequestKey[Resume] = RequestKey("resume", Resume)
_IDS: RequestKey[MintedIds] = RequestKey("minted_ids", MintedIds)


def take_resume(request: HttpRequest, data: bytes) -> bytes:
    """Move the router's field from the body to `resume_of`. Raises ApiError(400, 403)."""
    if RESUME_HEADER not in request.headers:
        return data
    fields = decode_or_none(data, dict[str, msgspec.Raw]) or {}
    raw = bytes(fields.pop(RESUME_FIELD, b""))
    if not is_signed(request.headers[RESUME_HEADER], request[SERVICES].spec.secret, raw):
        raise ApiError(403, f"{RESUME_FIELD}: only a router with the worker's --cluster-secret-file may set it")
    resume: Resume | None = decode_or_none(raw, Resume)
    if resume is None:
        raise bad_field(RESUME_FIELD, UNKNOWN_WORDS)
    _check(resume, request[SERVICES])
    request[_RESUME] = resume
    return _encode(fields)


def _check(resume: Resume, s: Services) -> None:
    """Raise ApiError(400) for harmful values, even if signed."""
    for source in resume.sources:
        if source is not None:
            s.spec.bootstrap_allowlist.check_source(source.control)
    try:
        ended = [msgspec.convert(how, FinishReason) for how in resume.ended if how is not None]
        logprobs = [one for pieces in (*resume.logprobs, *resume.prompt_logprobs) for one in _unpacked(pieces)]
    except (ValueError, msgspec.MsgspecError):  # no base64, no MessagePack, or wrong values
        raise bad_field(RESUME_FIELD, UNKNOWN_WORDS) from None
    stops = [how.matched for how in ended if isinstance(how.matched, int)]
    if not all(0 <= id < s.model.vocab_size for id in (*stops, *_ids_in(resume.output_ids, logprobs))):
        raise bad_field(
            RESUME_FIELD, f"has ids of tokens outside the model's vocabulary, 0 to {s.model.vocab_size - 1}"
        )


def _ids_in(output_ids: Sequence[Sequence[int]], logprobs: Sequence[TokenLogprob]) -> Iterator[int]:
    for ids in output_ids:
        yield from ids
    for one in logprobs:
        yield one.token_id
        yield from (id for _, id in (*one.top, *one.requested))


def check_signed(request: HttpRequest, data: bytes) -> None:
    """Raise ApiError(403) for an unsigned body."""
    if not is_signed(request.headers.get(RESUME_HEADER, ""), request[SERVICES].spec.secret, data):
        raise ApiError(403, f"{request.path}: {NOT_SIGNED}")


def resume_of(request: HttpRequest) -> Resume | None:
    """Return what the client already has, None for a new answer."""
    return request.get(_RESUME)


def ids_of(request: HttpRequest) -> MintedIds:
    ids = request.get(_IDS)
    if ids is None:
        resume = resume_of(request)
        ids = request[_IDS] = MintedIds(secrets.token_hex(16) if resume is None else resume.salt)
    return ids


def going_on(resume: Resume, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Restore the first worker's samples with their tokens. Raises ApiError(400)."""
    by_sample = (resume.names, resume.seeds, resume.output_ids, resume.ended, resume.logprobs, resume.prompt_logprobs)
    if {len(values) for values in by_sample} != {len(requests)}:
        raise bad_field(RESUME_FIELD, f"is of {len(resume.seeds)} samples, and the request has {len(requests)}")
    sources = resume.sources or [None] * len(requests)
    if len(sources) != len(requests):
        raise bad_field(RESUME_FIELD, f"has {len(sources)} sources of {len(requests)} samples")
    for request, ids in zip(requests, resume.output_ids, strict=True):
        most = request.sampling.max_new_tokens or 0
        if len(ids) > most:
            raise bad_field(RESUME_FIELD, f"has {len(ids)} tokens of a sample that ends at {most}")
    return [
        msgspec.structs.replace(
            request,
            rid=name,
            sampling=msgspec.structs.replace(request.sampling, seed=seed),
            output_ids=ids,
            source=None if source is None or not ids else KVSource(source.control, source.incarnation),
        )
        for request, name, seed, ids, source in zip(
            requests, resume.names, resume.seeds, resume.output_ids, sources, strict=True
        )
    ]


def earlier_of(resume: Resume, requests: Sequence[GenerateRequest]) -> list[TokenOutput]:
    return [_earlier(resume, i, request) for i, request in enumerate(requests)]


def _earlier(resume: Resume, index: int, request: GenerateRequest) -> TokenOutput:
    """Known logprobs are those shown; others become placeholders."""
    ids, ended = resume.output_ids[index], resume.ended[index]
    logprobs = _unpacked(resume.logprobs[index])
    if request.logprobs is not None and not logprobs:
        logprobs = [TokenLogprob(0.0, id) for id in ids]
    return TokenOutput(
        rid=request.rid,
        new_ids=list(ids),
        prompt_tokens=len(request.input_ids),
        completion_tokens=len(ids),
        logprobs=logprobs,
        input_logprobs=_unpacked(resume.prompt_logprobs[index]),
        finish=None if ended is None else msgspec.convert(ended, FinishReason),
    )


def _unpacked(pieces: Sequence[str]) -> list[TokenLogprob]:
    return [logprob for piece in pieces for logprob in _unpack(base64.b64decode(piece))]


def has_last(request: HttpRequest) -> bool:
    """True if the client has the events after all samples."""
    resume = resume_of(request)
    return resume is not None and resume.has_last


def started_of(
    request: HttpRequest, requests: Sequence[GenerateRequest], *, id: str, groups: Sequence[str], created: int
) -> Begun | None:
    """Return what another worker needs to continue; None if impossible or not requested.

    A worker without secret never offers it, because none could accept. Hidden states are recomputed
    there, except of ended samples of a whole answer.
    """
    spec = request[SERVICES].spec
    at_decode = spec.mode == "prefill" and any(r.bootstrap for r in requests)
    if FRAMES_HEADER not in request.headers or at_decode or spec.secret is None:
        return None
    if any(r.return_hidden_states and not r.stream for r in requests):
        return None
    return Begun(
        id=id,
        created=created,
        names=[r.rid for r in requests],
        groups=list(groups),
        seeds=[r.sampling.seed or 0 for r in requests],
        salt=ids_of(request).salt,
    )


def _leaving(moved: Mapping[int, KVSource | None]) -> bytes:
    return moved_frame(
        {
            index: None if kv is None else SampleSource(control=kv.control, incarnation=kv.incarnation)
            for index, kv in moved.items()
        }
    )


class Unframed:
    """Events as a client gets them."""

    def leaves_out(self, output: TextOutput) -> bool:
        """True if the output only reports that its sample moved."""
        return False

    def before(self, index: int, output: TextOutput, events: list[bytes]) -> bytes:
        """An output's frames and events, empty without events."""
        return b"".join(events)

    def before_last(self, events: list[bytes]) -> bytes:
        return b"".join(events)

    def nothing(self) -> bytes:
        """The last line of a stream without events."""
        return b""

    def leave(self, moved: Mapping[int, KVSource | None]) -> bytes:
        """The last lines of a stream that moved."""
        raise AssertionError("only a framed stream moves")

    def failed(self, status: int) -> bytes:
        return b""


UNFRAMED = Unframed()


class Frames(Unframed):
    """Frames before events; tokens of held-back text wait for its event.

    `repeats`: events repeat all logprobs of a sample. `num_events`: that the client has, if
    numbered. `kept`: retains them. `has_logprobs`: events show logprobs.
    """

    def __init__(
        self,
        begun: Begun,
        *,
        repeats: bool = False,
        num_events: int | None = None,
        kept: StreamLog | None = None,
        has_logprobs: bool = False,
    ) -> None:
        self._kept = kept
        self._begin = begin_frame(begun)
        self._repeats = repeats
        self._loses_logprobs = has_logprobs and not repeats
        self._num_events = num_events
        self._waiting: dict[int, bytes] = {}

    def leaves_out(self, output: TextOutput) -> bool:
        tokens = output.tokens
        return tokens.finish is None and not (tokens.new_ids or output.text or tokens.input_logprobs)

    def before(self, index: int, output: TextOutput, events: list[bytes]) -> bytes:
        frames = self._waiting.pop(index, b"") + self._frames_of(index, output.tokens)
        if not events:
            self._waiting[index] = frames
            return b""
        begin, self._begin = self._begin, b""
        return begin + self._unit(frames, events)

    def before_last(self, events: list[bytes]) -> bytes:
        return self._unit(LAST_FRAME, events) if events else b""

    def nothing(self) -> bytes:
        return whole_frame() if self._begin else b""

    def leave(self, moved: Mapping[int, KVSource | None]) -> bytes:
        """Held-back text stays so there; logprobs of its tokens are recomputed."""
        waiting = b"".join(self._waiting.values())
        if waiting and self._loses_logprobs:
            return self._begin + _leaving(dict.fromkeys(moved))
        return self._begin + waiting + _leaving(moved)

    def failed(self, status: int) -> bytes:
        return failed_frame(status)

    def _unit(self, frames: bytes, events: list[bytes]) -> bytes:
        if self._num_events is not None:
            self._num_events += len(events)
            frames += events_frame(self._num_events)
        if self._kept is not None:
            events = self._kept.add(frames, events)
        return frames + events[0] if len(events) == 1 else unit_of(frames + b"".join(events))

    def _frames_of(self, index: int, tokens: TokenOutput) -> bytes:
        frames = ids_frame(index, tokens.new_ids) if tokens.new_ids else b""
        if tokens.input_logprobs:
            frames += logprobs_frame(index, _pack(tokens.input_logprobs), of_prompt=True)
        if self._repeats and tokens.logprobs:
            frames += logprobs_frame(index, _pack(tokens.logprobs))
        if tokens.finish is not None:
            frames += end_frame(index, _encode(tokens.finish))
        return frames


class WholeFrames:
    """Increments of a non-streamed answer since the last frame."""

    def __init__(self, begun: Begun, answers: Mapping[int, TextOutput]) -> None:
        self._begin = begin_frame(begun)
        self._said = {index: _Said.of(answer.tokens) for index, answer in answers.items()}

    def news(self, answers: Mapping[int, TextOutput]) -> bytes:
        begin, self._begin = self._begin, b""
        return begin + unit_of(b"".join([self._of(index, answer.tokens) for index, answer in answers.items()]))

    def leave(self, answers: Mapping[int, TextOutput], moved: Mapping[int, KVSource | None]) -> bytes:
        return self.news(answers) + _leaving(moved)

    def _of(self, index: int, tokens: TokenOutput) -> bytes:
        said, now = self._said.get(index, _NOTHING), _Said.of(tokens)
        self._said[index], frames = now, b""
        if now.ids > said.ids:
            frames += ids_frame(index, tokens.new_ids[said.ids :])
        if now.prompt > said.prompt:
            frames += logprobs_frame(index, _pack(tokens.input_logprobs[said.prompt :]), of_prompt=True)
        if now.logprobs > said.logprobs:
            frames += logprobs_frame(index, _pack(tokens.logprobs[said.logprobs :]))
        if tokens.finish is not None and not said.has_ended:
            frames += end_frame(index, _encode(tokens.finish))
        return frames


class _Said(NamedTuple):
    ids: int
    prompt: int
    logprobs: int
    has_ended: bool

    @classmethod
    def of(cls, tokens: TokenOutput) -> "_Said":
        return cls(len(tokens.new_ids), len(tokens.input_logprobs), len(tokens.logprobs), tokens.finish is not None)


_NOTHING = _Said(0, 0, 0, False)


FRAMES_EVERY_S = 0.25


async def answer_framed(
    request: HttpRequest, generation: Generation, *, show: Callable[[list[TextOutput]], Any], begun: Begun
) -> Response:
    """Answer a request. `show`: makes the body. Raises ApiError before anything is sent.

    Short answers have no frames.
    """
    time_s = asyncio.get_running_loop().time
    answers, response = dict(generation.resumed), None
    frames, due_s = WholeFrames(begun, answers), time_s() + FRAMES_EVERY_S
    try:
        while not generation.done:
            for index, output in await generation.next():
                add(answers, index, output)
            if time_s() >= due_s and not generation.done:
                response = response or open_stream(request, headers={"Content-Type": FRAMES_TYPE})
                await response.write(frames.news(answers))
                due_s = time_s() + FRAMES_EVERY_S
    except ApiError as error:
        if response is None:
            raise
        body = errors_of(request).response(error).body
        assert isinstance(body, bytes)
        return await _ended(response, failed_frame(error.status, error.retry_after_s) + body)
    if generation.moved:
        response = response or open_stream(request, headers={"Content-Type": FRAMES_TYPE})
        return await _ended(response, frames.leave(answers, generation.moved))
    shown = show([answers[i] for i in range(len(generation.samples))])
    return json_response(shown) if response is None else await _ended(response, _encode(shown))


async def _ended(response: StreamedResponse, rest: bytes) -> Response:
    await response.end(rest)
    return response
