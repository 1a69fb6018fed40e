"""HTTP answers of a generation: JSON or server-sent events."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response

from engine.frontend.apis.shared.resumable import UNFRAMED, Frames, Unframed, answer_framed, has_last, resume_of
from engine.frontend.apis.shared.retained import retained
from engine.frontend.client.generation import Generation
from engine.frontend.services import SERVICES
from engine.text.sample import TextOutput
from service.http.errors import ApiError
from service.http.keep_alive import NO_BEATS_HEADER, KeepAlive
from service.http.reconnect import KEEP_HEADER
from service.http.request import DirectWrites, HttpRequest, StreamedResponse
from service.http.resume import Begun
from service.http.routes import DONE, SSE_HEADERS, errors_of, event, json_response

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI uses this


class View:
    num_events = 0  # chunks that the client has from another worker

    def body(self, answers: list[TextOutput]) -> Any:
        raise NotImplementedError

    def chunks(self, index: int, output: TextOutput) -> list[Any]:
        raise NotImplementedError

    def last(self) -> list[Any]:
        """Chunks that follow the last one of a sample."""
        return []


@dataclass(frozen=True, kw_only=True)
class Framing:
    """`encode`: a chunk; `done`: the end; `numbers`: chunks have numbers; `repeats`: chunks show a
    sample from the start. Errors: service/http/routes.py.
    """

    headers: Mapping[str, str] = field(default_factory=lambda: SSE_HEADERS)
    encode: Callable[[Any], bytes] = event
    done: bytes = b""
    numbers: bool = False
    repeats: bool = False


EVENTS = Framing(done=DONE)  # OpenAI's


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


async def answer(
    request: HttpRequest,
    generation: Generation,
    *,
    view: View,
    stream: bool,
    framing: Framing = EVENTS,
    begun: Begun | None = None,
    has_logprobs: bool = False,
) -> Response:
    """Serve the generation, then abort what is unfinished.

    Headers wait for the first output, so that its error has a status, at most until a comment is
    due. `begun`: it may move to another worker.
    """
    with generation:
        if begun is None:
            if not stream:
                return json_response(view.body(await generation.collect()))
            return await _stream(request, generation, view=view, framing=framing, frames=UNFRAMED)
        generation.can_move = True
        if not stream:
            return await answer_framed(request, generation, show=view.body, begun=begun)
        keeps = KEEP_HEADER in request.headers and framing.headers is SSE_HEADERS
        with retained(request, generation, begun) if keeps else nullcontext() as kept:
            numbered = _num_events(request) if framing.numbers else None
            frames = Frames(begun, repeats=framing.repeats, num_events=numbered, kept=kept, has_logprobs=has_logprobs)
            return await _stream(request, generation, view=view, framing=framing, frames=frames)


def _num_events(request: HttpRequest) -> int:
    resume = resume_of(request)
    return 0 if resume is None else resume.num_events


async def _stream(
    request: HttpRequest, generation: Generation, *, view: View, framing: Framing, frames: Unframed
) -> Response:
    for index, output in generation.resumed:
        view.chunks(index, output)  # the client has them
    view.num_events = _num_events(request)
    silence_s = 0.0 if NO_BEATS_HEADER in request.headers else request[SERVICES].spec.server.sse_keep_alive_interval_s
    with KeepAlive(request, interval_s=silence_s) as alive:
        try:
            response = await _events(request, generation, view=view, framing=framing, alive=alive, frames=frames)
        except ApiError as e:
            if alive.stream is None:
                raise
            response = alive.stream  # too late for a status; `done` does not follow
            await response.write(frames.failed(e.status) + errors_of(request).last_event(e))
        await alive.end()
        await response.end()
        return response


async def _events(
    request: HttpRequest,
    generation: Generation,
    *,
    view: View,
    framing: Framing,
    alive: KeepAlive,
    frames: Unframed,
) -> StreamedResponse:
    def show(outputs: list[tuple[int, TextOutput]]) -> bytes:
        return b"".join([_shown(view, framing, index, output, frames) for index, output in outputs])

    news = [] if generation.done else await generation.next()
    response = await alive.open(headers=framing.headers)
    await _write(response, show(news))
    direct = DirectWrites(response, take=lambda: show(generation.take()), is_over=lambda: generation.ends)
    with generation.followed(direct.on_change):
        while not generation.ends:
            if generation.has_news:
                await _write(response, show(generation.take()))
            else:
                await direct.wait()
    await _write(response, show(generation.take()))
    if generation.moved:
        await response.write(frames.leave(generation.moved))
        return response
    if not has_last(request):
        await _write(response, frames.before_last(list(map(framing.encode, view.last()))))
    await _write(response, framing.done or frames.nothing())
    return response


def _shown(view: View, framing: Framing, index: int, output: TextOutput, frames: Unframed) -> bytes:
    if frames.leaves_out(output):  # a view from the start would repeat the last event
        return b""
    return frames.before(index, output, list(map(framing.encode, view.chunks(index, output))))


async def _write(response: StreamedResponse, events: bytes) -> None:
    if events:
        await response.write(events)
