"""How a simulated worker answers: whole, as a stream of events, or in the router's frames. Tokens have no text."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from engine.frontend.apis.shared.prefill_only import vector_of
from engine.frontend.apis.shared.resumable import Frames, WholeFrames
from engine.frontend.client.generation import Generation, add
from engine.messages import GenerateRequest, TokenOutput
from engine.text.sample import TextOutput
from service.http.errors import ApiError
from service.http.reconnect import StreamLog
from service.http.resume import FRAMES_HEADER, FRAMES_TYPE, Begun, failed_frame
from service.http.routes import DONE, OPENAI
from tools.simulation.http import Reply, Request
from tools.simulation.world import Violation


class NoText:
    """`Text` of tokens that stand for nothing."""

    def read(self, output: TokenOutput) -> TextOutput:
        return TextOutput(text="", tokens=output)


async def answered(
    route: Callable[[Request, Reply], Coroutine[Any, Any, None]], request: Request, reply: Reply
) -> None:
    """With an error's status, where there is one."""
    try:
        await route(request, reply)
    except ApiError as error:
        retry_after = "" if error.retry_after_s is None else str(error.retry_after_s)
        reply.whole(error.status, msgspec.json.encode(OPENAI.body(error)), retry_after=retry_after)


def begun_of(request: Request, requests: list[GenerateRequest]) -> Begun:
    if FRAMES_HEADER not in request.headers:
        raise Violation("a router that asks for no frames")
    names = [r.rid for r in requests]
    return Begun(id="", created=0, names=names, groups=names, seeds=[0] * len(names), salt="")


async def answer_by_events(generation: Generation, reply: Reply, begun: Begun, kept: StreamLog | None) -> None:
    """As engine/frontend/apis/shared/samples.py: what fails before the first output has a status. What is `kept` is an
    event for each token, and one more after the last; else an output is one event.
    """
    frames, done = Frames(begun, kept=kept), b"" if kept is None else DONE
    news = [] if generation.done else await generation.next()
    reply.head(200, "text/event-stream")
    try:
        while True:
            for index, output in news:
                if events := frames.before(index, output, _events(output, several=bool(done))):
                    reply.chunk(events)
            if generation.done:
                break
            news = await generation.next()
        if generation.moved:
            reply.chunk(frames.leave(generation.moved))
        elif last := done or frames.nothing():
            reply.chunk(last)
    except ApiError as error:
        reply.chunk(failed_frame(error.status) + _event(OPENAI.body(error)))
    reply.finish()


async def answer_framed(generation: Generation, reply: Reply, begun: Begun) -> None:
    """As engine/frontend/apis/shared/resumable.py, but with frames for every output: time is another here."""
    answers, has_begun = dict(generation.resumed), False
    frames = WholeFrames(begun, answers)
    try:
        while not generation.done:
            for index, output in await generation.next():
                add(answers, index, output)
            if not generation.done:
                if not has_begun:
                    reply.head(200, FRAMES_TYPE)
                    has_begun = True
                reply.chunk(frames.news(answers))
    except ApiError as error:
        if not has_begun:
            raise
        reply.chunk(failed_frame(error.status, error.retry_after_s) + msgspec.json.encode(OPENAI.body(error)))
        return reply.finish()
    if generation.moved:
        if not has_begun:
            reply.head(200, FRAMES_TYPE)
        reply.chunk(frames.leave(answers, generation.moved))
        return reply.finish()
    body = body_of([answers[i] for i in range(len(generation.samples))])
    if not has_begun:
        return reply.whole(200, body)
    reply.chunk(body)
    return reply.finish()


def body_of(answers: list[TextOutput]) -> bytes:
    return msgspec.json.encode({"samples": [_sample(output) for output in answers]})


def vectors_of(answers: list[TextOutput]) -> bytes:
    return msgspec.json.encode({"vectors": [vector_of(output).tolist() for output in answers]})


def _events(output: TextOutput, *, several: bool) -> list[bytes]:
    """`several`: one of each token, then one of the end, as some APIs write."""
    sample = _sample(output)
    if not several:
        return [_event(sample)]
    shown = [{"tokens": [token], "finish": None} for token in sample["tokens"]]
    return [_event(event) for event in (*shown, *([] if sample["finish"] is None else [{**sample, "tokens": []}]))]


def _event(event: Any) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _sample(output: TextOutput) -> dict[str, Any]:
    finish = output.tokens.finish
    return {"tokens": output.tokens.new_ids, "finish": None if finish is None else msgspec.structs.asdict(finish)}
