"""HTTP routes of the registry."""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from fastapi import Response
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bootstrap_server.protocol import MAX_BODY_BYTES, MAX_BUT, Registration, RegistrationReply, RoomBatch
from bootstrap_server.registry import BootstrapConfig, Registry
from service.http.api import OPENAPI_PATH, ApiRouter, Application, document
from service.http.errors import ApiError, RequestLimits, decode_body
from service.http.guard import answer_of, make_guard
from service.http.listening import ListeningPort, open_port
from service.http.request import Handler, HttpRequest, StreamedResponse
from service.http.routes import OPENAI, Routes, Tag, delete, get, json_response, post, put
from service.http.server import serving
from service.process.start import allow_many_files
from service.process.stop_signals import StopSignals
from service.security.browser import BrowserRule
from service.security.keys import AUTH_HEADER, CHALLENGE_HEADER, Access, Call, KeyGate, KeyRing, Verdict, Verifier

# ---- Signatures of calls and answers, except for `OPEN_PATHS`.

LOG_EVERY_S = 5.0
OPEN_PATHS = ("/health", "/metrics", OPENAPI_PATH)  # for probes and scrapers; no addresses

log = logging.getLogger(__name__)


class SignatureCheck:
    """Verifies calls, signs answers, counts refusals."""

    def __init__(self, verifier: Verifier | None) -> None:
        self.num_refused = 0
        self._verifier = verifier
        self._next_log_s = 0.0

    async def answer(self, request: HttpRequest, handler: Handler) -> Response:
        verifier = self._verifier
        if verifier is None or request.path in OPEN_PATHS:
            return await handler(request)
        now_s = time.monotonic()
        call = Call(request.method, request.target, await request.read())
        verdict, nonce = verifier.verify(request.headers.get(AUTH_HEADER, ""), call, now_s)
        if verdict is Verdict.FORGED:
            self._count(request, now_s)
        if verdict is not Verdict.GOOD:
            return _unsigned(verifier.challenge(now_s))
        response = await handler(request)
        if not isinstance(response, StreamedResponse):
            response.headers[AUTH_HEADER] = verifier.sign_answer(
                nonce, status=response.status_code, body=bytes(response.body)
            )
        return response

    def _count(self, request: HttpRequest, now_s: float) -> None:
        self.num_refused += 1
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            text = "%s was refused: its call is not signed with this cluster's secret, or was made before (%d so far)"
            log.warning(text, request.remote, self.num_refused)


def _unsigned(challenge: str) -> Response:
    message = f"{AUTH_HEADER}: missing or wrong; start every worker with the same --cluster-secret-file"
    response = OPENAI.response(ApiError(401, message, code="unsigned"))
    response.headers[CHALLENGE_HEADER] = challenge
    return response


# ---- Prometheus metrics of a bootstrap server.

STATUSES = (200, 400, 401, 404, 500, 503)


class BootstrapMetrics(Collector):
    def __init__(self, registry: Registry, num_refused: Callable[[], int]) -> None:
        self._registry = registry
        self._num_refused = num_refused
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(self)
        self._calls = Counter(
            "tandem_bootstrap_calls", "calls that were answered", ["call", "status"], registry=self._metrics
        )

    def expect(self, call: str) -> None:
        """`rate()` misses the first event, so a series starts at 0."""
        for status in STATUSES:
            self._calls.labels(call, str(status))

    def on_answered(self, call: str, status: int) -> None:
        self._calls.labels(call, str(status)).inc()

    def exposition(self) -> bytes:
        return generate_latest(self._metrics)

    def collect(self) -> Iterator[Metric]:
        workers, rooms = float(self._registry.num_workers), float(self._registry.num_rooms)
        yield GaugeMetricFamily("tandem_bootstrap_workers", "prefill workers that are registered", workers)
        yield GaugeMetricFamily("tandem_bootstrap_rooms", "rooms whose owner is known", rooms)
        refused = "calls refused: not signed with the cluster's secret"
        yield CounterMetricFamily("tandem_bootstrap_refused", refused, float(self._num_refused()))


# ---- app

TITLE = "Tandem bootstrap server"
NO_KEYS = KeyGate(KeyRing(), KeyRing(flag="--admin-api-key"))
LIMITS = RequestLimits(max_body_bytes=MAX_BODY_BYTES)
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(registry: Registry, *, config: BootstrapConfig, secret: bytes | None = None) -> Application:
    """The application verifies and signs with a `secret`."""
    check = SignatureCheck(None if secret is None else Verifier(secret))
    browser = BrowserRule(
        host=config.host,
        has_keys=secret is not None,
        allowed_hosts=config.allowed_hosts,
        key_flag="--cluster-secret-file",
    )
    metrics = BootstrapMetrics(registry, lambda: check.num_refused)
    api = BootstrapHandlers(registry, check, metrics).api()
    routes = Routes(api.table)
    for path, methods in routes.paths().items():
        for method in methods if path not in OPEN_PATHS else ():
            metrics.expect(f"{method} {path}")
    guard = make_guard(routes, gate=NO_KEYS, need_of=lambda method, path: Access.NONE, browser=browser)

    async def signed(request: HttpRequest) -> Response:
        return await check.answer(request, guard)

    async def handle(request: HttpRequest) -> Response:
        response = await answer_of(signed, request)
        path = routes.of(request).path
        if path and path not in OPEN_PATHS:
            metrics.on_answered(f"{request.method} {path}", response.status_code)
        return response

    return Application(TITLE, (api,), handle=handle, limits=LIMITS)


class BootstrapHandlers:
    def __init__(self, registry: Registry, check: SignatureCheck, metrics: BootstrapMetrics) -> None:
        self._check = check
        self._metrics = metrics
        self._registry = registry
        self._server_id = uuid.uuid4().hex

    def api(self) -> ApiRouter:
        return ApiRouter(
            Tag("Bootstrap", "Prefill workers and the rooms that they hold, for decode workers."),
            (
                put("/route", self.register),
                get("/route", self.look_up),
                delete("/route", self.leave),
                post("/rooms", self.register_rooms),
                get("/health", self.health),
                get("/metrics", self.metrics, plain_text=True),
                get(OPENAPI_PATH, self.openapi),
            ),
        )

    def _now(self) -> float:
        now_s = time.monotonic()
        self._registry.expire(now_s)
        return now_s

    async def register(self, request: HttpRequest) -> Response:
        """Register a prefill worker, or renew its lease."""
        worker = decode_body(await request.read(), Registration)
        self._registry.register(worker, self._now())
        return json_response(RegistrationReply(self._registry.lease_s, self._registry.shared, self._server_id))

    async def look_up(self, request: HttpRequest) -> Response:
        """Find the prefill worker of a room."""
        self._now()
        room = _room(request)
        if request.query.get("any") != "1":
            return json_response(self._registry.look_up(room))
        return json_response(self._registry.look_up_any(room, but=_but(request)))

    async def leave(self, request: HttpRequest) -> Response:
        """Forget a prefill worker."""
        incarnation = request.query.get("incarnation")
        if not incarnation:
            raise ApiError(400, "incarnation: the query parameter is missing")
        self._registry.leave(incarnation)
        return json_response({})

    async def register_rooms(self, request: HttpRequest) -> Response:
        """Note the rooms that a prefill worker holds."""
        batch = decode_body(await request.read(), RoomBatch)
        self._registry.register_rooms(batch.incarnation, batch.rooms, self._now())
        return json_response({})

    async def health(self, request: HttpRequest) -> Response:
        """Count workers and rooms."""
        self._now()
        counts = {"workers": self._registry.num_workers, "rooms": self._registry.num_rooms}
        return json_response({**counts, "refused": self._check.num_refused})

    async def openapi(self, request: HttpRequest) -> Response:
        """Describe these routes as OpenAPI."""
        return json_response(document((self.api(),), title=TITLE))

    async def metrics(self, request: HttpRequest) -> Response:
        """Return Prometheus metrics."""
        self._now()
        return Response(content=self._metrics.exposition(), headers={"Content-Type": METRICS_CONTENT_TYPE})


def _room(request: HttpRequest) -> int:
    text = request.query.get("room", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) < 2**63):
        raise ApiError(400, f"room: the query parameter must be between 1 and 2**63-1, got {text[:40]!r}")
    return int(text)


def _but(request: HttpRequest) -> list[str]:
    names = request.query.get("but", "").split(",")
    if len(names) > MAX_BUT:
        raise ApiError(400, f"but: at most {MAX_BUT} incarnations, got {len(names)}")
    return names


# ---- Runs a bootstrap server, in a thread of a prefill worker or as a process.

START_S = 10.0
CLOSE_S = 1.0  # for answers in progress at the end


class BootstrapServer:
    def __init__(
        self, config: BootstrapConfig, *, shared: bool, secret: bytes | None = None, port_flag: str = "--port"
    ) -> None:
        self.registry = Registry(config, shared=shared)
        self.port = 0
        self._config = config
        self._port_flag = port_flag
        self._app = make_app(self.registry, config=config, secret=secret)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._held = ExitStack()

    def start(self) -> None:
        """It listens on return. Raises ConfigError."""
        port = self._held.enter_context(open_port(self._config.host, self._config.port, flag=self._port_flag))
        self.port = port.port
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(port)), name="bootstrap-server", daemon=True
        )
        self._thread.start()
        if not self._ready.wait(START_S):
            raise RuntimeError(f"the bootstrap server did not start within {START_S:g} s")

    def close(self) -> None:
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S)
        self._held.close()

    async def _serve(self, port: ListeningPort) -> None:
        self._loop = asyncio.get_running_loop()
        async with serving(port, self._app, LIMITS, shutdown_timeout_s=CLOSE_S):
            self._ready.set()
            await self._stop.wait()


def run_bootstrap_server(config: BootstrapConfig, *, secret: bytes | None = None) -> None:
    """Raises ConfigError."""
    allow_many_files()
    app = make_app(Registry(config, shared=True), config=config, secret=secret)
    with open_port(config.host, config.port) as port:
        asyncio.run(_serve(port, app))


async def _serve(port: ListeningPort, app: Application) -> None:
    signals = StopSignals()
    with signals.caught():
        async with serving(port, app, LIMITS, shutdown_timeout_s=CLOSE_S):
            log.info("bootstrap server listens on %s:%d", port.host, port.port)
            await signals.requested.wait()
