"""One life of the router: the production dispatcher, race, legs, worker table, health monitor and guard over a session
and requests that are simulated. They are coroutines; the loop that runs them has virtual time (aio.py).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import HttpVersion11, web
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict
from yarl import URL

from router.admission.admission import Admission
from router.attempts.encoder_headers import EncoderHeaders
from router.attempts.pair_attempt import AttemptLauncher, RoomMinter
from router.body import Api
from router.choice.chooser import make_chooser
from router.choice.encoders import Encoders
from router.client.credentials import Credentials
from router.config import RouterConfig
from router.history.recorder import Recorder
from router.history.trace import RequestTraces
from router.http.access import need_of
from router.metrics import RouterMetrics, counted
from router.pool.health import HealthMonitor
from router.pool.moves import MoveOrders
from router.pool.states import Health
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from router.requests.build import make_dispatcher, make_events
from router.requests.live import LiveRequests
from router.requests.responses import Responses
from service.http.guard import make_guard
from service.http.routes import Routes
from service.http.stream import REQUEST_ID_HEADER
from service.process.stop_signals import StopSignals
from service.security.browser import BrowserRule
from service.security.keys import open_gate
from service.telemetry.tracer import Tracer
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Call, Head, Reply, Request, call, serve
from tools.simulation.network import Network
from tools.simulation.options import SECRET, Options
from tools.simulation.upstream import SimulatedUpstream
from tools.simulation.world import Process, Violation

PORT = 80


class Router:
    def __init__(
        self, *, process: Process, network: Network, options: Options, workers: list[tuple[str, Role]]
    ) -> None:
        self.process = process
        self.aio = VirtualLoop(process)
        draw = network.world.rng(f"router/{process.name}")
        self.network = network
        self.signals = StopSignals()
        config = self.config = RouterConfig(
            pd_disaggregation=True,
            policy=options.policy,
            retry_max=options.retry_max,
            health_check_interval_s=0.5,
            health_check_timeout_s=1.0,
            health_silence_s=options.silence_s,
            load_poll_interval_s=1.0,
            request_timeout_s=60.0,
            sse_keep_alive_interval_s=1.0,
            max_concurrent_requests=options.max_concurrent,
            resume_window_s=options.resume_window_s,
        )
        chooser = make_chooser(config, draw=draw.randrange)
        self.table = WorkerTable(on_gone=chooser.forget)
        self.encoders = EncoderHeaders(encoders=Encoders(), table=self.table, secret=SECRET)
        self.rooms = RoomMinter(draw.getrandbits)
        session: Any = _Session(network, process, config)
        self._upstream = SimulatedUpstream(
            network=network, process=process, aio=self.aio, request_timeout_s=config.request_timeout_s
        )
        metrics = RouterMetrics(self.table)
        failovers: Any = _Counted(network.world.seen, "failovers")
        metrics.failovers = failovers
        gate = open_gate(api_key=None, api_key_file=None, admin_api_key=None, admin_api_key_file=None)
        credentials = Credentials(api=gate.api)
        self.live = LiveRequests()
        self.moves = MoveOrders(session, credentials, secret=SECRET)
        self.monitor = HealthMonitor(
            config=config,
            table=self.table,
            session=session,
            credentials=credentials,
            upstream=self._upstream if options.heartbeats else None,
            let_go=self.moves.let_go,
            on_info=self.encoders.encoders.on_info,
        )
        admission, recorder = Admission(config), Recorder(self.aio.time)
        traces = RequestTraces(Tracer(ring_size=0), recorder)
        forecast = admission.forecast
        launcher = AttemptLauncher(
            table=self.table,
            rooms=self.rooms,
            upstream=self._upstream,
            events=make_events(
                traces=traces, recorder=recorder, metrics=metrics, forecast=forecast, monitor=self.monitor
            ),
            secret=SECRET,
            clock=self.aio.time,
            encoders=self.encoders,
        )
        self.dispatcher = make_dispatcher(
            config,
            launcher=launcher,
            chooser=chooser,
            admission=admission,
            metrics=metrics,
            credentials=credentials,
            live=self.live,
            responses=Responses(book=None),
            session=session,
        )
        browser = BrowserRule(host=config.host, has_keys=False)
        generate = counted(self.dispatcher.handle, metrics)
        routes = Routes(web.post(api.value, generate) for api in Api)
        self._guard = make_guard(routes, gate=gate, need_of=need_of, browser=browser, new_id=lambda: process.name)
        self._num_requests = 0
        self._seen = (0, 0, 0)
        for node, role in workers:
            self.table.add(f"http://{node}:80", role=role)
        self.aio.run(self._watch_all)
        serve(network, process, f"{process.node}:{PORT}", self._handle)

    def _watch_all(self) -> None:
        for worker in self.table.workers():
            self.monitor.watch(worker)

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.path not in tuple(Api):
            reply.whole(404, b"{}")  # what the web server does
            return
        self._num_requests += 1
        name = request.headers.get(REQUEST_ID_HEADER) or f"{self.process.name}-{self._num_requests}"
        self._upstream.note(name, request)
        incoming: Any = _IncomingRequest(self.aio, request, reply, name)
        task = self.aio.run(lambda: self.aio.create_task(self._serve(incoming, reply)))
        reply.on_gone = lambda: self.aio.run(task.cancel)  # handler_cancellation=True

    async def _serve(self, request: Any, reply: Reply) -> None:
        response = await self._guard(request)
        if isinstance(response, web.Response):
            body = response.body if isinstance(response.body, bytes) else b""
            reply.whole(response.status, body, retry_after=response.headers.get("Retry-After", ""))

    def has_asked(self, node: str, since_s: float) -> bool:
        """Whether all this time, by the world's clock, it has taken the worker at `node` for one that may live."""
        worker = self.table.find(f"http://{node}:80")
        changed_s = worker.changed_s - self.process.skew_s
        return worker.health is not Health.DOWN and changed_s < since_s and self.process.born_s < since_s

    def check_if_changed(self) -> None:
        seen = (self.table.loads.num_leases, self.rooms.num_live, len(self.aio.errors))
        if seen != self._seen:
            self._seen = seen
            self.check()

    def check(self) -> None:
        self.table.check()
        self.rooms.check()
        if self.aio.errors:
            raise Violation(f"{self.process.name}: an error was lost: {self.aio.errors[0]}")

    def leftovers(self) -> list[str]:
        open_things = {
            "leases": self.table.loads.num_leases,
            "rooms": self.rooms.num_live,
            "tails": len(self.dispatcher.launcher.tails),
        }
        return [f"{self.process.name}: {count} {what}" for what, count in open_things.items() if count]


class _Counted:
    """A metric of that name: what it counts by its last label is seen by the whole run, whatever becomes of the router."""

    def __init__(self, seen: Counter[str], name: str) -> None:
        self._seen = seen
        self._name = name

    def labels(self, *values: str) -> "_Counted":
        return _Counted(self._seen, f"{self._name} {values[-1]}")

    def inc(self) -> None:
        self._seen[self._name] += 1


class _IncomingRequest(dict[Any, Any]):
    """What the dispatcher and `web.StreamResponse` use of a `web.Request`."""

    method = "POST"
    version = HttpVersion11
    keep_alive = True
    body_exists = True
    protocol = SimpleNamespace(is_full=False)

    def __init__(self, loop: VirtualLoop, request: Request, reply: Reply, request_id: str) -> None:
        super().__init__()
        self.path = request.path
        self.headers = CIMultiDict(
            {REQUEST_ID_HEADER: request_id, "Content-Type": "application/json", **request.headers}
        )
        self._body = request.body
        self.writer = self._payload_writer = _Writer(reply)

    async def read(self) -> bytes:
        return self._body

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """No application, no signals."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class _Writer:
    """`AbstractStreamWriter` to the client."""

    buffer_size = output_size = 0
    length: int | None = None

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def enable_chunking(self) -> None:
        """Parts are parts here anyway."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        self._reply.head(int(status_line.split()[1]), headers.get("Content-Type", ""))

    def send_headers(self) -> None:
        """Sent by `write_headers`."""

    async def write(self, chunk: bytes) -> None:
        if not self._reply.connected:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        self.output_size += len(chunk)
        self._reply.chunk(bytes(chunk))

    async def write_eof(self, chunk: bytes = b"") -> None:
        if chunk:
            await self.write(chunk)
        self._reply.finish()


class _Session:
    """`aiohttp.ClientSession` over the simulated network."""

    def __init__(self, network: Network, process: Process, config: RouterConfig) -> None:
        self._network = network
        self._process = process
        self._config = config

    def get(
        self, url: str, *, timeout: aiohttp.ClientTimeout, headers: Any, allow_redirects: bool
    ) -> AbstractAsyncContextManager["_Response"]:
        parts = URL(url)
        timeout_s = timeout.total or 60.0
        return _Getting(lambda: self._open(Request("GET", parts.path), f"{parts.host}:{parts.port}", timeout_s))

    def request(
        self,
        method: str,
        url: str,
        *,
        data: bytes | None,
        headers: Any,
        timeout: aiohttp.ClientTimeout,
        allow_redirects: bool,
    ) -> AbstractAsyncContextManager["_Response"]:
        parts = URL(url)
        asked = Request(method, parts.path, data or b"", dict(headers))
        return _Getting(lambda: self._open(asked, f"{parts.host}:{parts.port}", timeout.total or 60.0))

    async def _open(self, request: Request, address: str, timeout_s: float) -> "_Response":
        response = _Response(address, asyncio.get_running_loop(), timeout_s)
        call(self._network, self._process, address, request, response.call)
        try:
            await response.head_came()
        except BaseException:
            response.close()
            raise
        return response


class _Getting(AbstractAsyncContextManager["_Response"]):
    def __init__(self, open_it: Callable[[], Awaitable["_Response"]]) -> None:
        self._open = open_it

    async def __aenter__(self) -> "_Response":
        self._response = await self._open()
        return self._response

    async def __aexit__(self, *_: object) -> None:
        self._response.close()


class _Response:
    """`aiohttp.ClientResponse`: one at a time waits for the next part."""

    def __init__(self, address: str, loop: Any, timeout_s: float) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.content_type = ""
        self.content = self
        self._loop = loop
        self._deadline_s = loop.time() + timeout_s
        self._address = address
        self._parts: deque[bytes] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.call = Call(self._on_head, self._on_chunk, self._on_end, self._on_lost)

    def _on_head(self, head: Head) -> None:
        self.status, self.content_type = head.status, head.content_type
        self.headers["Content-Type"] = head.content_type
        if head.retry_after:
            self.headers["Retry-After"] = head.retry_after
        self._wake()

    def _on_chunk(self, data: bytes) -> None:
        self._parts.append(data)
        self._wake()

    def _on_end(self) -> None:
        self._ended = True
        self._wake()

    def _on_lost(self, reason: str) -> None:
        if reason == "refused":
            host, _, port = self._address.partition(":")
            key = ConnectionKey(host, int(port), False, True, None, None, None)
            self._error = aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "Connect call failed"))
        elif not self.status:
            self._error = aiohttp.ServerDisconnectedError()
        else:
            self._error = aiohttp.ClientPayloadError("the connection was lost")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._loop.run(lambda: self._waiter.set_result(None))

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        left_s = self._deadline_s - self._loop.time()
        timer = self._loop.call_later(max(0.0, left_s), self._on_timeout, self._waiter)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _on_timeout(self, waiter: "asyncio.Future[None]") -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError())

    async def head_came(self) -> None:
        while not self.status:
            self._raise()
            await self._wait()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    async def readany(self) -> bytes:
        while not self._parts:
            self._raise()
            if self._ended:
                return b""
            await self._wait()
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    async def read(self) -> bytes:
        parts: list[bytes] = []
        while data := await self.readany():
            parts.append(data)
        return b"".join(parts)

    async def iter_any(self) -> Any:
        while data := await self.readany():
            yield data

    def is_eof(self) -> bool:
        return self._ended and not self._parts

    def close(self) -> None:
        if self.call.over:
            return
        self.call.cancel()
        if not self._ended:
            self._error = aiohttp.ClientConnectionError("Connection closed")
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    release = close
