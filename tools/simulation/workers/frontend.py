"""The HTTP side of a simulated worker: bodies in, the production `EngineClient` under virtual time, answers out.

Stands in for the aiohttp handlers and the tokenizer; tokens have no text. What decides is production code: who is taken, refused,
early rejected or handed back (engine/frontend/client/engine_client.py, forecast.py), and when it has drained (server.py).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from engine.frontend.apis.admin.control import MoveOutBody
from engine.frontend.apis.admin.health import HeartbeatLines
from engine.frontend.apis.admin.load import v1_loads_entry
from engine.frontend.client.engine_client import ClientLimits, EngineClient
from engine.frontend.client.generation import Generation
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.messages import GenerateRequest, GetStep, SchedulerReady, ToFrontend, TokenOutput, ToScheduler
from engine.stamps import Stamped
from service.http import heartbeats
from service.http.errors import DRAINING, ApiError, decode_body, read_body
from service.http.guard import request_timeout_s
from service.http.reconnect import RETAINED_PATH
from service.http.resume import FRAMES_HEADER, MOVE_OUT, RESUME_HEADER
from service.process.stop_signals import StopSignals
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Reply, Request
from tools.simulation.kept import KeptStreams
from tools.simulation.options import Options
from tools.simulation.workers.bodies import (
    EmbeddingBody,
    Figures,
    GenerateBody,
    NoText,
    answer_by_events,
    answer_framed,
    answered,
    begun_of,
    body_of,
    embedding_requests_of,
    requests_of,
    resumed,
    seen_by_encoders,
    vectors_of,
)
from tools.simulation.world import Process, Violation

HEARD_RECENTLY_S = 1.0
HEALTH_TIMEOUT_S = 1.0
BEAT_S = 0.1  # a quarter of the router's --health-silence
LATE_S = 0.2  # a turn of the loop, one of the process, the ways between them


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
            open_text=lambda request: NoText(),
            observer=Figures(process.world.seen),
            limits=ClientLimits(
                max_running=options.max_running,
                max_queued=options.max_queued,
                early_rejection=options.early_rejection and role != "decode",
            ),
        )
        self.kept = KeptStreams(process, self.aio, self.signals, most_bytes=options.most_kept_bytes)
        self._process = process
        self._role = role
        self._has_heartbeats = options.heartbeats
        self._num_requests = 0
        self._max_running, self._info = options.max_running, info
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
        task: asyncio.Task[None] = self.aio.run(lambda: self.aio.create_task(answered(route, request, reply)))
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

    # ---- what it says of itself

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

    # ---- what is asked

    async def _generate(self, request: Request, reply: Reply) -> None:
        body = decode_body(request.body, GenerateBody)
        if (body.resume is None) is (RESUME_HEADER in request.headers):
            raise Violation(f"{self._process.name}: a resumed answer and its header belong together")
        requests, earlier = resumed(body, requests_of(body, self._new_rid))
        requests = seen_by_encoders(request, requests, role=self._role)
        with self._begin(requests, request, earlier=earlier) as generation:
            generation.can_move = FRAMES_HEADER in request.headers
            if body.stream:
                begun, kept = begun_of(request, requests), None
                if begun is not None and self._role != "prefill":
                    kept = self.kept.open(request, generation, begun, body.resume)
                try:
                    await answer_by_events(generation, reply, begun, kept)
                finally:
                    if kept is not None:
                        self.kept.end(kept)
            elif self._role == "prefill" or FRAMES_HEADER not in request.headers:
                reply.whole(200, body_of(await generation.collect()))
            else:
                begun = begun_of(request, requests)
                assert begun is not None
                await answer_framed(generation, reply, begun)

    async def _move_out(self, request: Request, reply: Reply) -> None:
        """As engine/frontend/apis/admin/control.py."""
        if self._role != "decode":
            raise ApiError(409, "only a decode worker has requests that move with their KV")
        body = read_body(request.body, MoveOutBody)
        moving = [
            sample.rid for sample in body.samples if self.client.move_out(sample.rid, sample.room, owner=body.owner)
        ]
        reply.whole(200, msgspec.json.encode({"moving": moving}))

    async def _embeddings(self, request: Request, reply: Reply) -> None:
        """As engine/frontend/apis/openai/embeddings.py."""
        body = decode_body(request.body, EmbeddingBody)
        requests = embedding_requests_of(body, self._new_rid)
        with self._begin(requests, request) as generation:
            reply.whole(200, vectors_of(await generation.collect()))

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

    def _new_rid(self) -> str:
        self._num_requests += 1
        return f"{self._process.name}-{self._num_requests}"
