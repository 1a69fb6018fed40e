"""The HTTP side of the registry: an aiohttp app, and a server that runs in a thread of its own or blocks.

Every body is decoded strictly and limited in size; every error is one JSON message. With a secret every call but
/health and /metrics is signed (service/security/signing.py), and so is every answer.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from bootstrap_server.config import BootstrapConfig
from bootstrap_server.metrics import BootstrapMetrics
from bootstrap_server.protocol import (
    MAX_BODY_BYTES,
    MAX_BUT,
    Lease,
    Registration,
    RoomBatch,
)
from bootstrap_server.registry import Registry
from service.http.errors import ApiError, decode_body
from service.http.guard import answer_of, make_guard
from service.http.routes import Handler, Routes
from service.http.server import Limits, make_runner
from service.http.stream import json_response
from service.process.open_files import allow_many_files
from service.process.stop_signals import StopSignals
from service.security.browser import BrowserRule
from service.security.keys import Access, Gate, KeyRing
from service.security.signing import AUTH_HEADER, CHALLENGE_HEADER, Call, Verdict, Verifier

START_S = 10.0
CLOSE_S = 1.0  # for answers that are under way at the end
LOG_EVERY_S = 5.0
OPEN_PATHS = ("/health", "/metrics")  # for probes and scrapers: counts, no addresses
LIMITS = Limits(max_body_bytes=MAX_BODY_BYTES)
NO_KEYS = Gate(KeyRing(), KeyRing(flag="--admin-api-key"))
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger(__name__)


def make_handle(
    registry: Registry,
    *,
    config: BootstrapConfig,
    secret: bytes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Handler:
    """The function that answers every request.

    `secret`: callers must prove that they know it, or get a 401 (except on `OPEN_PATHS`); errors are signed like answers.
    """
    check = SignatureCheck(None if secret is None else Verifier(secret), clock)
    browser = BrowserRule(
        host=config.host,
        has_keys=secret is not None,
        allowed_hosts=config.allowed_hosts,
        key_flag="--cluster-secret-file",
    )
    metrics = BootstrapMetrics(registry, lambda: check.num_refused)
    routes = Routes(BootstrapApi(registry, config, clock, check, metrics).routes())
    guard = make_guard(routes, gate=NO_KEYS, need_of=lambda method, path: Access.NONE, browser=browser)

    async def signed(request: web.BaseRequest) -> web.StreamResponse:
        return await check.answer(request, guard)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        response = await answer_of(signed, request)
        path = routes.find(request.method, request.path).path
        if path and path not in OPEN_PATHS:
            metrics.on_answered(f"{request.method} {path}", response.status)
        return response

    return handle


class BootstrapApi:
    """The handlers."""

    def __init__(
        self,
        registry: Registry,
        config: BootstrapConfig,
        clock: Callable[[], float],
        check: "SignatureCheck",
        metrics: BootstrapMetrics,
    ) -> None:
        self._check = check
        self._metrics = metrics
        self._registry = registry
        self._config = config
        self._clock = clock
        self._life = uuid.uuid4().hex

    def routes(self) -> list[web.RouteDef]:
        """All routes of the server."""
        return [
            web.put("/route", self.register),
            web.get("/route", self.look_up),
            web.delete("/route", self.leave),
            web.post("/rooms", self.register_rooms),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        ]

    def _now(self) -> float:
        now_s = self._clock()
        self._registry.expire(now_s)
        return now_s

    async def register(self, request: web.BaseRequest) -> web.Response:
        worker = decode_body(await request.read(), Registration)
        self._registry.register(worker, self._now())
        return json_response(Lease(self._config.lease, self._registry.shared, self._life))

    async def look_up(self, request: web.BaseRequest) -> web.Response:
        self._now()
        room = _room(request)
        if request.query.get("any") != "1":
            return json_response(self._registry.look_up(room))
        return json_response(self._registry.look_up_any(room, but=_but(request)))

    async def leave(self, request: web.BaseRequest) -> web.Response:
        incarnation = request.query.get("incarnation")
        if not incarnation:
            raise ApiError(400, "incarnation: the query parameter is missing")
        self._registry.leave(incarnation)
        return json_response({})

    async def register_rooms(self, request: web.BaseRequest) -> web.Response:
        batch = decode_body(await request.read(), RoomBatch)
        self._registry.register_rooms(batch.incarnation, batch.rooms, self._now())
        return json_response({})

    async def health(self, request: web.BaseRequest) -> web.Response:
        self._now()
        counts = {"workers": self._registry.num_workers, "rooms": self._registry.num_rooms}
        return json_response({**counts, "refused": self._check.num_refused})

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        self._now()
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": METRICS_CONTENT_TYPE})


class BootstrapServer:
    """The app in a thread of its own, with its own event loop: inside a prefill worker, or for tests."""

    def __init__(self, config: BootstrapConfig, *, shared: bool, secret: bytes | None = None) -> None:
        self.registry = Registry(config, shared=shared)
        self.port = 0
        self._config = config
        self._handle = make_handle(self.registry, config=config, secret=secret)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error: OSError | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="bootstrap-server", daemon=True)

    def start(self) -> None:
        """Returns when it listens. Raises OSError (which names host and port) when it cannot."""
        self._thread.start()
        if not self._ready.wait(START_S):
            raise OSError(f"bootstrap server did not start within {START_S:g} s")
        if self._error is not None:
            self._thread.join()
            raise self._error

    def close(self) -> None:
        if self._thread.is_alive() and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        runner = make_runner(self._handle, LIMITS, shutdown_timeout_s=CLOSE_S)
        try:
            await runner.setup()
            self.port = await _listen(runner, self._config)
        except OSError as error:
            self._error = error
            self._ready.set()
        else:
            self._ready.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()


def run_bootstrap_server(config: BootstrapConfig, *, secret: bytes | None = None) -> None:
    """A shared server on its own: blocks until SIGINT or SIGTERM. Raises OSError when it cannot listen."""
    allow_many_files()
    asyncio.run(_serve_alone(config, make_handle(Registry(config, shared=True), config=config, secret=secret)))


async def _serve_alone(config: BootstrapConfig, handle: Handler) -> None:
    signals = StopSignals()
    runner = make_runner(handle, LIMITS, shutdown_timeout_s=CLOSE_S)
    with signals.caught():
        try:
            await runner.setup()
            port = await _listen(runner, config)
            logging.getLogger(__name__).info("bootstrap server listens on %s:%d", config.host, port)
            await signals.asked.wait()
        finally:
            await runner.cleanup()


async def _listen(runner: web.ServerRunner, config: BootstrapConfig) -> int:
    """Returns the port. Raises OSError, which names host and port."""
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        raise _listen_error(config, error) from None
    return int(runner.addresses[0][1])


def _listen_error(config: BootstrapConfig, error: OSError) -> OSError:
    return OSError(
        error.errno, f"bootstrap server cannot listen on {config.host}:{config.port}: {error.strerror or error}"
    )


class SignatureCheck:
    """Lets in calls that are signed with the cluster's secret; signs the answers; counts what is refused."""

    def __init__(self, verifier: Verifier | None, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._verifier = verifier
        self._clock = clock
        self._next_log_s = 0.0

    async def answer(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """The handler's answer, signed; or a 401."""
        verifier = self._verifier
        if verifier is None or request.path in OPEN_PATHS:
            return await handler(request)
        now_s = self._clock()
        call = Call(request.method, request.raw_path, await request.read())
        verdict, nonce = verifier.verify(request.headers.get(AUTH_HEADER, ""), call, now_s)
        if verdict is Verdict.FORGED:
            self._count(request, now_s)
        if verdict is not Verdict.GOOD:
            return _unsigned(verifier.challenge(now_s))
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            response.headers[AUTH_HEADER] = verifier.sign_answer(nonce, status=response.status, body=response.body)
        return response

    def _count(self, request: web.BaseRequest, now_s: float) -> None:
        self.num_refused += 1
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            text = "%s was refused: its call is not signed with this cluster's secret, or was made before (%d so far)"
            log.warning(text, request.remote, self.num_refused)


def _unsigned(challenge: str) -> web.Response:
    message = f"{AUTH_HEADER}: missing or wrong; start every worker with the same --cluster-secret-file"
    response = ApiError(401, message, code="unsigned").response()
    response.headers[CHALLENGE_HEADER] = challenge
    return response


def _room(request: web.BaseRequest) -> int:
    text = request.query.get("room", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) < 2**63):
        raise ApiError(400, f"room: the query parameter must be between 1 and 2**63-1, got {text[:40]!r}")
    return int(text)


def _but(request: web.BaseRequest) -> list[str]:
    names = request.query.get("but", "").split(",")
    if len(names) > MAX_BUT:
        raise ApiError(400, f"but: at most {MAX_BUT} incarnations, got {len(names)}")
    return names
