"""Bodies that a simulated worker takes, the requests of its engine that they ask for, and its answers.

An answer is whole, a stream of events, or in the router's frames. Tokens have no text.
"""

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.frontend.apis.shared.image_encoders import with_image_encoders
from engine.frontend.apis.shared.prefill_only import NOTHING_NEW, vector_of
from engine.frontend.apis.shared.resumable import UNFRAMED, Frames, WholeFrames, earlier_of, going_on
from engine.frontend.client.generation import Generation, add
from engine.frontend.services import SERVICES
from engine.messages import Bootstrap, GenerateRequest, TokenOutput
from engine.sampling_params import SamplingParams
from engine.text.sample import TextOutput
from service.http.errors import ApiError, bad_field
from service.http.reconnect import StreamLog
from service.http.resume import FRAMES_HEADER, FRAMES_TYPE, Begun, Resume, failed_frame
from service.http.routes import DONE, OPENAI
from service.kv_events import namespace_of
from tools.simulation.http import Reply, Request
from tools.simulation.options import SECRET
from tools.simulation.workers.images import PlacedImage
from tools.simulation.world import Violation


class Figures:
    """`Observer` that keeps one figure."""

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def on_reject(self) -> None:
        self._seen["early rejections"] += 1

    def on_start(self, num_prompt_tokens: int) -> None: ...
    def on_tokens(self, *, num_tokens: int, gap_s: float, first: bool) -> None: ...
    def on_end(self, output: TextOutput | None, *, elapsed_s: float) -> None: ...


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


def begun_of(request: Request, requests: list[GenerateRequest]) -> Begun | None:
    """None: a client of this worker gets events as they are."""
    if FRAMES_HEADER not in request.headers:
        if any(r.bootstrap is not None for r in requests):
            raise Violation("a router that asks for no frames")
        return None
    names = [r.rid for r in requests]
    return Begun(id="", created=0, names=names, groups=names, seeds=[0] * len(names), salt="")


async def answer_by_events(generation: Generation, reply: Reply, begun: Begun | None, kept: StreamLog | None) -> None:
    """As engine/frontend/apis/shared/samples.py: what fails before the first output has a status. What is `kept` is an
    event for each token, and one more after the last; else an output is one event.
    """
    frames = UNFRAMED if begun is None else Frames(begun, kept=kept)
    done = b"" if kept is None else DONE
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
        reply.chunk(frames.failed(error.status) + _event(OPENAI.body(error)))
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


MAX_NEW_TOKENS = 4096


class SamplingBody(msgspec.Struct):
    max_new_tokens: int
    n: int = 1


class GenerateBody(msgspec.Struct):
    input_ids: list[int]
    sampling_params: SamplingBody
    bootstrap_room: int | list[int] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int] | None = None
    stream: bool = False
    priority: int = 0
    extra_key: str = ""
    images: list[tuple[int, int]] = []  # where each begins, and its number
    resume: Resume | None = None


class EmbeddingBody(msgspec.Struct):
    input: list[list[int]]


def requests_of(body: GenerateBody, new_rid: Callable[[], str]) -> list[GenerateRequest]:
    """Samples of one body."""
    rooms, hosts, ports = map(_listed, (body.bootstrap_room, body.bootstrap_host, body.bootstrap_port))
    if body.bootstrap_room is None:
        rooms = hosts = ports = [None] * body.sampling_params.n
    if not (len(rooms) == len(hosts) == len(ports) == body.sampling_params.n):
        raise bad_field("bootstrap_room", "as many rooms as samples")
    num_new = min(body.sampling_params.max_new_tokens, MAX_NEW_TOKENS)
    images = [PlacedImage(start, number).input() for start, number in body.images]
    return [
        GenerateRequest(
            rid=new_rid(),
            input_ids=body.input_ids,
            sampling=SamplingParams(max_new_tokens=num_new, temperature=0.0),
            bootstrap=None if room is None else Bootstrap(host, port, room),
            stream=body.stream,
            priority=body.priority,
            namespace=namespace_of(None, body.extra_key),
            images=images,
        )
        for room, host, port in zip(rooms, hosts, ports, strict=True)
    ]


def embedding_requests_of(body: EmbeddingBody, new_rid: Callable[[], str]) -> list[GenerateRequest]:
    """As engine/frontend/apis/openai/embeddings.py."""
    return [
        GenerateRequest(
            rid=new_rid(),
            input_ids=ids,
            sampling=NOTHING_NEW,
            skip_cache_insert=True,
            alone=True,
            pooling="mean",
        )
        for ids in body.input
    ]


def resumed(body: GenerateBody, requests: list[GenerateRequest]) -> tuple[list[GenerateRequest], Sequence[TokenOutput]]:
    """Requests that go on where an earlier answer ended, and its outputs."""
    if body.resume is None:
        return requests, ()
    requests = going_on(body.resume, requests)
    return requests, earlier_of(body.resume, requests)


def seen_by_encoders(request: Request, requests: list[GenerateRequest], *, role: str) -> list[GenerateRequest]:
    """With the encoder workers that the router names."""
    spec = SimpleNamespace(mode=role, secret=SECRET, bootstrap_allowlist=SimpleNamespace(admits=lambda at: True))
    web: Any = _Web(request.headers, spec)
    return with_image_encoders(web, requests)


class _Web(dict[Any, Any]):
    """`headers` of a request, and the services of its worker."""

    def __init__(self, headers: Mapping[str, str], spec: SimpleNamespace) -> None:
        super().__init__({SERVICES: SimpleNamespace(spec=spec)})
        self.headers = headers


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
