"""The HTTP side of a simulated worker: bodies in, the production `EngineClient` under virtual time, answers out.

Stands in for the aiohttp handlers and the tokenizer; tokens have no text. What decides is production code: who is taken, refused,
early rejected or handed back (engine/frontend/client/engine_client.py, forecast.py), and when it has drained (server.py).
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.frontend.apis.admin.control import MoveOutBody
from engine.frontend.apis.admin.health import HeartbeatLines
from engine.frontend.apis.admin.load import v1_loads_entry
from engine.frontend.apis.shared.image_encoders import with_image_encoders
from engine.frontend.apis.shared.prefill_only import NOTHING_NEW, vector_of
from engine.frontend.apis.shared.resumable import Frames, WholeFrames, earlier_of, going_on
from engine.frontend.client.engine_client import ClientLimits, EngineClient
from engine.frontend.client.generation import Generation, add
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.frontend.services import SERVICES, request_timeout_s
from engine.messages import Bootstrap, GenerateRequest, GetStep, SchedulerReady, ToFrontend, TokenOutput, ToScheduler
from engine.sampling_params import SamplingParams
from engine.stamps import Stamped
from engine.text.sample import TextOutput
from service.http import heartbeats
from service.http.api_shapes import DONE, OPENAI
from service.http.errors import DRAINING, ApiError, bad_field, decode_body
from service.http.reconnect import RETAINED_PATH
from service.http.resume import FRAMES_HEADER, FRAMES_TYPE, MOVE_OUT, RESUME_HEADER, Begun, Resume, failed_frame
from service.kv_events import namespace_of
from service.process.stop_signals import StopSignals
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Reply, Request
from tools.simulation.kept import KeptStreams
from tools.simulation.options import SECRET, Options
from tools.simulation.workers.images import PlacedImage
from tools.simulation.world import Process, Violation

MAX_NEW_TOKENS = 4096
HEARD_RECENTLY_S = 1.0
HEALTH_TIMEOUT_S = 1.0
BEAT_S = 0.1  # a quarter of the router's --health-silence
LATE_S = 0.2  # a turn of the loop, one of the process, the ways between them


class SamplingBody(msgspec.Struct):
    max_new_tokens: int
    n: int = 1


class GenerateBody(msgspec.Struct):
    input_ids: list[int]
    sampling_params: SamplingBody
    bootstrap_room: int | list[int]
    bootstrap_host: str | list[str]
    bootstrap_port: int | list[int]
    stream: bool = False
    priority: int = 0
    extra_key: str = ""
    images: list[tuple[int, int]] = []  # where each begins, and its number
    resume: Resume | None = None


class EmbeddingBody(msgspec.Struct):
    input: list[list[int]]


class Frontend:
    def __init__(
        self,
        *,
        process: Process,
        role: str,
        options: Options,
        send: Callable[[ToScheduler | GetStep], None],
        info: dict[str, Any],
    ) -> None:
        """`send`: to the scheduler. `info`: what /server_info says."""
        self.aio = VirtualLoop(process)
        self.signals = StopSignals()
        self.on_post: Callable[[Request], None] = lambda request: None
        self.client = EngineClient(
            Leaders([SchedulerLink(send, self.aio.time)]),
            open_text=lambda request: _NoText(),
            observer=_Figures(process),
            limits=ClientLimits(
                max_running=options.max_running,
                max_queued=options.max_queued,
                early_rejection=options.early_rejection and role != "decode",
            ),
        )
        self.kept = KeptStreams(process, self.aio, self.signals, most_bytes=options.most_kept_bytes)
        self._process = process
        self._role = role
        self._max_running = options.max_running
        self._has_heartbeats = options.heartbeats
        self._info = info
        self._num_requests = 0
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._error: BaseException | None = None
        self._routes: dict[str, Callable[[Request, Reply], Coroutine[Any, Any, None]]] = {
            "/health": self._health,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/generate": self._generate,
            MOVE_OUT: self._move_out,
            RETAINED_PATH: self.kept.answer,
            "/v1/embeddings": self._embeddings,
        }
        self.on_message(SchedulerReady({}))

    @property
    def num_open(self) -> int:
        """Requests without an end of their answer."""
        return max(self.client.num_live, self.num_handlers)

    @property
    def num_handlers(self) -> int:
        return len(self._handlers)

    def handle(self, request: Request, reply: Reply) -> None:
        if self._has_heartbeats and request.path.partition("?")[0] == heartbeats.PATH:
            self._begin_heartbeats(reply)
            return
        route = self._routes.get(request.path)
        if route is None:
            reply.whole(404, b"{}")
            return
        if request.method == "POST":
            self.on_post(request)
        task: asyncio.Task[None] = self.aio.run(lambda: self.aio.create_task(_answered(route, request, reply)))
        if not task.done():
            self._handlers[id(task)] = task
        task.add_done_callback(self._on_done)
        reply.on_gone = lambda: self.aio.run(task.cancel)  # handler_cancellation=True

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._handlers.pop(id(task), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error

    def on_message(self, message: ToFrontend) -> None:
        self.aio.run(lambda: self.client.on_message(message))

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.aio.errors:
            raise Violation(f"{self._process.name}: an error was lost: {self.aio.errors[0]}")
        self.kept.check()

    # ---- what is asked

    async def _health(self, request: Request, reply: Reply) -> None:
        """As engine/frontend/apis/admin/health.py."""
        if self.client.is_draining:
            reply.whole(503, msgspec.json.encode({"status": DRAINING}), retry_after="1")
            return
        if self.aio.time() - self.client.leaders.last_message_s > HEARD_RECENTLY_S:
            await self.client.leaders.steps(timeout_s=HEALTH_TIMEOUT_S)
        reply.whole(200, b"{}")

    def _begin_heartbeats(self, reply: Reply) -> None:
        """As engine/frontend/apis/admin/health.py, of a worker of one process."""
        lines = HeartbeatLines()

        def beat() -> None:
            if not reply.connected:
                return
            now_s, client = self.aio.time(), self.client
            stamps = [Stamped(self._process.name, now_s, busy_since_s=None, num_steps=self._num_requests)]
            reply.chunk(lines.next(stamps, now_s=now_s, num_live=client.num_live, fine=client.closed is None))
            self._process.after(BEAT_S, "heartbeat", beat)

        reply.head(200, heartbeats.TYPE)
        reply.chunk(heartbeats.first_line(BEAT_S))
        self._process.after(BEAT_S, "heartbeat", beat)

    async def _server_info(self, request: Request, reply: Reply) -> None:
        reply.whole(200, msgspec.json.encode({**self._info, **self.client.leaders.updated}))

    async def _loads(self, request: Request, reply: Reply) -> None:
        (state,) = await self.client.recent_states(timeout_s=HEALTH_TIMEOUT_S)
        entry = v1_loads_entry(
            state, mode=self._role, max_running_requests=self._max_running, num_live=self.client.num_live
        )
        reply.whole(200, msgspec.json.encode({"loads": [entry]}))

    async def _generate(self, request: Request, reply: Reply) -> None:
        body = decode_body(request.body, GenerateBody)
        if (body.resume is None) is (RESUME_HEADER in request.headers):
            raise Violation(f"{self._process.name}: a resumed answer and its header belong together")
        requests, earlier = self._read(body), list[TokenOutput]()
        if body.resume is not None:
            requests = going_on(body.resume, requests)
            earlier = earlier_of(body.resume, requests)
        requests = with_image_encoders(self._as_web(request), requests)
        with self._begin(requests, request, earlier=earlier) as generation:
            generation.can_move = FRAMES_HEADER in request.headers
            if body.stream:
                begun = _begun(request, requests)
                kept = None if self._role == "prefill" else self.kept.open(request, generation, begun, body.resume)
                try:
                    await _stream(generation, reply, Frames(begun, kept=kept), done=b"" if kept is None else DONE)
                finally:
                    if kept is not None:
                        self.kept.end(kept)
            elif self._role == "prefill" or FRAMES_HEADER not in request.headers:
                reply.whole(200, _body(await generation.collect()))
            else:
                await _answer_framed(generation, reply, _begun(request, requests))

    async def _move_out(self, request: Request, reply: Reply) -> None:
        """As engine/frontend/apis/admin/control.py."""
        if self._role != "decode":
            raise ApiError(409, "only a decode worker has requests that move with their KV")
        body = decode_body(request.body, MoveOutBody)
        moving = [
            sample.rid for sample in body.samples if self.client.move_out(sample.rid, sample.room, owner=body.owner)
        ]
        reply.whole(200, msgspec.json.encode({"moving": moving}))

    async def _embeddings(self, request: Request, reply: Reply) -> None:
        """As engine/frontend/apis/openai/embeddings.py."""
        body = decode_body(request.body, EmbeddingBody)
        requests = [
            GenerateRequest(
                rid=self._new_rid(),
                input_ids=ids,
                sampling=NOTHING_NEW,
                skip_cache_insert=True,
                alone=True,
                pooling="mean",
            )
            for ids in body.input
        ]
        with self._begin(requests, request) as generation:
            vectors = [vector_of(output).tolist() for output in await generation.collect()]
        reply.whole(200, msgspec.json.encode({"vectors": vectors}))

    def _begin(
        self, requests: list[GenerateRequest], request: Request, *, earlier: Sequence[TokenOutput] = ()
    ) -> Generation:
        """Who would come too late for its deadline must not get past here."""
        timeout_s = request_timeout_s(request.headers)
        forecast = next(iter(self.client.forecasts), None)
        num_tokens = sum(len(r.input_ids) for r in requests)
        wait_s = None if forecast is None else forecast.wait_s(num_tokens, self.aio.time())
        generation = self.client.generate(requests, timeout_s=timeout_s, earlier=earlier)
        if self.signals.requested.is_set():
            raise Violation(f"{self._process.name}: takes a request while it drains")
        if wait_s is not None and timeout_s is not None and wait_s > timeout_s:
            raise Violation(f"{self._process.name}: taken, though it waits {wait_s:.2f} s and has {timeout_s:.2f} s")
        if timeout_s is not None:
            now_s = self._process.world.now_s
            self._process.after(timeout_s + LATE_S, "judge a deadline", self._judge, generation, now_s, timeout_s)
        return generation

    def _judge(self, generation: Generation, since_s: float, timeout_s: float) -> None:
        """Past its deadline nothing runs any more (unless its process was frozen)."""
        left = [s.wire_rid for s in generation.samples if s.wire_rid in self.client._live]
        if left and self._process.thawed_s < since_s:
            raise Violation(f"{self._process.name}: {left[0]} lives {LATE_S:g} s past its deadline of {timeout_s:g} s")

    def _as_web(self, request: Request) -> Any:
        """What of a `web.Request` names encoder workers."""
        spec = SimpleNamespace(
            mode=self._role, secret=SECRET, bootstrap_allowlist=SimpleNamespace(admits=lambda at: True)
        )
        return _Web(request.headers, spec)

    def _read(self, body: GenerateBody) -> list[GenerateRequest]:
        """Samples of one body."""
        rooms, hosts, ports = map(_listed, (body.bootstrap_room, body.bootstrap_host, body.bootstrap_port))
        if not (len(rooms) == len(hosts) == len(ports) == body.sampling_params.n):
            raise bad_field("bootstrap_room", "as many rooms as samples")
        num_new = min(body.sampling_params.max_new_tokens, MAX_NEW_TOKENS)
        images = [PlacedImage(start, number).input() for start, number in body.images]
        return [
            GenerateRequest(
                rid=self._new_rid(),
                input_ids=body.input_ids,
                sampling=SamplingParams(max_new_tokens=num_new, temperature=0.0),
                bootstrap=Bootstrap(host, port, room),
                stream=body.stream,
                priority=body.priority,
                namespace=namespace_of(None, body.extra_key),
                images=images,
            )
            for room, host, port in zip(rooms, hosts, ports, strict=True)
        ]

    def _new_rid(self) -> str:
        self._num_requests += 1
        return f"{self._process.name}-{self._num_requests}"


class _Web(dict[Any, Any]):
    """`headers` of a request, and the services of its worker."""

    def __init__(self, headers: Mapping[str, str], spec: SimpleNamespace) -> None:
        super().__init__({SERVICES: SimpleNamespace(spec=spec)})
        self.headers = headers


class _NoText:
    """`Text` of tokens that stand for nothing."""

    def read(self, output: TokenOutput) -> TextOutput:
        return TextOutput(text="", tokens=output)


class _Figures:
    """`Observer` that keeps one figure."""

    def __init__(self, process: Process) -> None:
        self._seen = process.world.seen

    def on_reject(self) -> None:
        self._seen["early rejections"] += 1

    def on_start(self, num_prompt_tokens: int) -> None: ...
    def on_tokens(self, *, num_tokens: int, gap_s: float, first: bool) -> None: ...
    def on_end(self, output: TextOutput | None, *, elapsed_s: float) -> None: ...


async def _answered(
    route: Callable[[Request, Reply], Coroutine[Any, Any, None]], request: Request, reply: Reply
) -> None:
    """With an error's status, where there is one."""
    try:
        await route(request, reply)
    except ApiError as error:
        retry_after = "" if error.retry_after_s is None else str(error.retry_after_s)
        reply.whole(error.status, msgspec.json.encode(OPENAI.body(error)), retry_after=retry_after)


def _begun(request: Request, requests: list[GenerateRequest]) -> Begun:
    if FRAMES_HEADER not in request.headers:
        raise Violation("a router that asks for no frames")
    names = [r.rid for r in requests]
    return Begun(id="", created=0, names=names, groups=names, seeds=[0] * len(names), salt="")


async def _stream(generation: Generation, reply: Reply, frames: Frames, *, done: bytes) -> None:
    """As engine/frontend/apis/shared/stream.py: what fails before the first output has a status. `done`: after the last event; empty: an
    output is one event.
    """
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


async def _answer_framed(generation: Generation, reply: Reply, begun: Begun) -> None:
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
    body = _body([answers[i] for i in range(len(generation.samples))])
    if not has_begun:
        return reply.whole(200, body)
    reply.chunk(body)
    return reply.finish()


def _body(answers: list[TextOutput]) -> bytes:
    return msgspec.json.encode({"samples": [_sample(output) for output in answers]})


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


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
