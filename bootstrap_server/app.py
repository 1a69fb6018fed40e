"""The HTTP side of the registry: an aiohttp app, and a server that runs in a thread of its own or blocks.

Every body is decoded strictly and limited in size; every error is one JSON message. With a secret every call but
/health and /metrics is signed (security/signing.py), and so is every answer.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from bootstrap_server.config import BootstrapConfig
from bootstrap_server.metrics import BootstrapMetrics
from bootstrap_server.protocol import (
    MAX_BODY_BYTES,
    MAX_BUT,
    ErrorReply,
    Lease,
    Registration,
    RoomBatch,
)
from bootstrap_server.registry import Registry, RegistryError
from lifecycle.open_files import allow_many_files
from lifecycle.stop_signals import StopSignals
from security.browser import BrowserRule
from security.expect import say_continue
from security.json_depth import JSON_ERRORS
from security.signing import AUTH_HEADER, CHALLENGE_HEADER, Call, Verdict, Verifier

START_S = 10.0
CLOSE_S = 1.0  # for answers that are under way at the end
LOG_EVERY_S = 5.0
OPEN_PATHS = ("/health", "/metrics")  # for probes and scrapers: counts, no addresses
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    registry: Registry,
    *,
    config: BootstrapConfig,
    secret: bytes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """`secret`: callers must prove that they know it, or get a 401 (except on `OPEN_PATHS`)."""
    guard = Guard(None if secret is None else Verifier(secret), clock)
    has_keys = secret is not None
    rule = BrowserRule(
        host=config.host, has_keys=has_keys, allowed_hosts=config.allowed_hosts, key_flag="--cluster-secret-file"
    )
    metrics = BootstrapMetrics(registry, lambda: guard.num_refused)
    middlewares = [
        _counting(metrics),
        _errors_as_json,
        guard.middleware,
        _errors_as_json,  # errors are signed like answers
        _page_check(rule),
    ]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    routes = Routes(registry, config, clock, guard, metrics)
    app.router.add_put("/route", routes.register, expect_handler=say_continue)
    app.router.add_get("/route", routes.look_up, expect_handler=say_continue)
    app.router.add_delete("/route", routes.leave, expect_handler=say_continue)
    app.router.add_post("/rooms", routes.register_rooms, expect_handler=say_continue)
    app.router.add_get("/health", routes.health, expect_handler=say_continue)
    app.router.add_get("/metrics", routes.metrics, expect_handler=say_continue)
    return app


class Routes:
    def __init__(
        self,
        registry: Registry,
        config: BootstrapConfig,
        clock: Callable[[], float],
        guard: "Guard",
        metrics: BootstrapMetrics,
    ) -> None:
        self._guard = guard
        self._metrics = metrics
        self._registry = registry
        self._config = config
        self._clock = clock
        self._life = uuid.uuid4().hex

    def _now(self) -> float:
        now_s = self._clock()
        self._registry.expire(now_s)
        return now_s

    async def register(self, request: web.Request) -> web.Response:
        worker = _decode(await request.read(), Registration)
        self._registry.register(worker, self._now())
        return _json(Lease(self._config.lease, self._registry.shared, self._life))

    async def look_up(self, request: web.Request) -> web.Response:
        self._now()
        room = _room(request)
        if request.query.get("any") != "1":
            return _json(self._registry.look_up(room))
        return _json(self._registry.look_up_any(room, but=_but(request)))

    async def leave(self, request: web.Request) -> web.Response:
        incarnation = request.query.get("incarnation")
        if not incarnation:
            raise RegistryError(400, "incarnation: the query parameter is missing")
        self._registry.leave(incarnation)
        return _json({})

    async def register_rooms(self, request: web.Request) -> web.Response:
        batch = _decode(await request.read(), RoomBatch)
        self._registry.register_rooms(batch.incarnation, batch.rooms, self._now())
        return _json({})

    async def health(self, request: web.Request) -> web.Response:
        self._now()
        counts = {"workers": self._registry.num_workers, "rooms": self._registry.num_rooms}
        return _json({**counts, "refused": self._guard.num_refused})

    async def metrics(self, request: web.Request) -> web.Response:
        self._now()
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": METRICS_CONTENT_TYPE})


class BootstrapServer:
    """The app in a thread of its own, with its own event loop: inside a prefill worker, or for tests."""

    def __init__(self, config: BootstrapConfig, *, shared: bool, secret: bytes | None = None) -> None:
        self.registry = Registry(config, shared=shared)
        self.port = 0
        self._config = config
        self._app = make_app(self.registry, config=config, secret=secret)
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
        runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=CLOSE_S)
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
    asyncio.run(_serve_alone(config, make_app(Registry(config, shared=True), config=config, secret=secret)))


async def _serve_alone(config: BootstrapConfig, app: web.Application) -> None:
    signals = StopSignals()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
    with signals.caught():
        try:
            await runner.setup()
            port = await _listen(runner, config)
            logging.getLogger(__name__).info("bootstrap server listens on %s:%d", config.host, port)
            await signals.asked.wait()
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, config: BootstrapConfig) -> int:
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


class Guard:
    """Lets in calls that are signed with the cluster's secret; signs the answers; counts who was refused."""

    def __init__(self, verifier: Verifier | None, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._verifier = verifier
        self._clock = clock
        self._next_log_s = 0.0

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
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

    def _count(self, request: web.Request, now_s: float) -> None:
        self.num_refused += 1
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            text = "%s was refused: its call is not signed with this cluster's secret, or was made before (%d so far)"
            log.warning(text, request.remote, self.num_refused)


def _unsigned(challenge: str) -> web.Response:
    response = _fail(401, f"{AUTH_HEADER}: missing or wrong; start every worker with the same --cluster-secret-file")
    response.headers[CHALLENGE_HEADER] = challenge
    return response


def _page_check(rule: BrowserRule) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Refuse what a web page could have sent."""

    @web.middleware
    async def check_page(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = rule.refusal(request.method, request.path, request.headers, has_body=request.body_exists)
        if refusal is not None:
            return _fail(refusal.status, refusal.message)
        return await handler(request)

    return check_page


def _counting(metrics: BootstrapMetrics) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def counting(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        if resource is not None and request.path not in OPEN_PATHS:
            metrics.on_answered(f"{request.method} {resource.canonical}", response.status)
        return response

    return counting


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RegistryError as error:
        return _fail(error.status, str(error))
    except web.RequestPayloadError as error:  # broken chunks, wrong compression, a body cut short
        response = _fail(400, f"body: cannot be read: {' '.join(str(error).split())}")
        response.force_close()  # where the next request would begin is unknown
        return response
    except web.HTTPRequestEntityTooLarge:
        return _fail(413, f"body: longer than {MAX_BODY_BYTES} bytes")
    except web.HTTPException as error:
        return _fail(error.status, f"{request.method} {request.path}: {error.reason}")


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except JSON_ERRORS as error:
        raise RegistryError(400, f"body: {error}") from None


def _room(request: web.Request) -> int:
    text = request.query.get("room", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) < 2**63):
        raise RegistryError(400, f"room: the query parameter must be between 1 and 2**63-1, got {text[:40]!r}")
    return int(text)


def _but(request: web.Request) -> list[str]:
    names = request.query.get("but", "").split(",")
    if len(names) > MAX_BUT:
        raise RegistryError(400, f"but: at most {MAX_BUT} incarnations, got {len(names)}")
    return names


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _fail(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(ErrorReply(message)), content_type="application/json")
