"""One life of the router: the production dispatcher, race, legs, worker table, health monitor and guard over a session
and requests that are simulated. They are coroutines; the loop that runs them has virtual time (aio.py).
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from router.attempts.pair_attempt import AttemptLauncher, RoomMinter
from router.body import Api
from router.choice.policies import make_chooser
from router.client.credentials import Credentials
from router.compose.dispatcher import Owners, make_dispatcher
from router.compose.events import make_events
from router.compose.routes import need_of
from router.config import RouterConfig
from router.history.recorder import Recorder
from router.history.trace import RequestTraces
from router.metrics import RouterMetrics, counted
from router.parts.admission import Admission
from router.parts.encoders import Encoders
from router.parts.failover import MoveOrders
from router.pool.breaker import Health
from router.pool.health import HealthMonitor
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from router.requests.dispatch import LiveRequests
from service.http.api_shapes import REQUEST_ID_HEADER
from service.http.guard import make_guard
from service.http.routes import Routes
from service.process.stop_signals import StopSignals
from service.security.browser import BrowserRule
from service.security.keys import open_gate
from service.telemetry.records import Tracer
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Reply, Request, serve
from tools.simulation.network import Network
from tools.simulation.options import SECRET, Options
from tools.simulation.upstream import SimulatedSession, SimulatedUpstream
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
        self.encoders = Encoders(table=self.table, secret=SECRET)
        self.rooms = RoomMinter(draw.getrandbits)
        self._upstream = SimulatedUpstream(
            network=network, process=process, aio=self.aio, request_timeout_s=config.request_timeout_s
        )
        session: Any = SimulatedSession(self._upstream)
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
            on_info=self.encoders.on_info,
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
        )
        owners = Owners(
            admission=admission,
            encoders=self.encoders,
            book=None,
            live=self.live,
            credentials=credentials,
            session=session,
        )
        self.dispatcher = make_dispatcher(config, owners, launcher, chooser)
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
        changed_s = worker.checks.changed_s - self.process.skew_s
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
