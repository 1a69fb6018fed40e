"""The HTTP side of the registry: an aiohttp app, and a server that runs in a thread of its own or blocks.

Every body is decoded strictly and limited in size; every error is one JSON message.
"""

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from bootstrap_server.config import BootstrapConfig
from bootstrap_server.protocol import (
    MAX_BODY_BYTES,
    MAX_BUT,
    SECRET_HEADER,
    ErrorReply,
    Lease,
    Registration,
    RoomBatch,
    token,
)
from bootstrap_server.registry import Registry, RegistryError

START_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    registry: Registry,
    *,
    config: BootstrapConfig,
    secret: bytes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """`secret`: callers must send its token, or get a 401 (except on /health)."""
    app = web.Application(middlewares=[_errors_as_json, _guard(secret)], client_max_size=MAX_BODY_BYTES)
    routes = Routes(registry, config, clock)
    app.router.add_put("/route", routes.register)
    app.router.add_get("/route", routes.look_up)
    app.router.add_delete("/route", routes.leave)
    app.router.add_post("/rooms", routes.register_rooms)
    app.router.add_get("/health", routes.health)
    return app


class Routes:
    def __init__(self, registry: Registry, config: BootstrapConfig, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._config = config
        self._clock = clock

    def _now(self) -> float:
        now_s = self._clock()
        self._registry.expire(now_s)
        return now_s

    async def register(self, request: web.Request) -> web.Response:
        worker = _decode(await request.read(), Registration)
        self._registry.register(worker, self._now())
        return _json(Lease(self._config.lease, self._registry.shared))

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
        return _json({"workers": self._registry.num_workers, "rooms": self._registry.num_rooms})


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
        runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=1.0)
        try:
            await runner.setup()
            await self._listen(runner)
        except OSError as error:
            self._error = _listen_error(self._config, error)
            self._ready.set()
        else:
            self._ready.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        site = web.TCPSite(runner, self._config.host, self._config.port)
        await site.start()
        self.port = runner.addresses[0][1]


def run_bootstrap_server(config: BootstrapConfig, *, secret: bytes | None = None) -> None:
    """A shared server on its own: blocks until SIGINT or SIGTERM. Raises OSError when it cannot listen."""
    app = make_app(Registry(config, shared=True), config=config, secret=secret)
    try:
        web.run_app(app, host=config.host, port=config.port, access_log=None, print=logging.getLogger(__name__).info)
    except OSError as error:
        raise _listen_error(config, error) from None


def _listen_error(config: BootstrapConfig, error: OSError) -> OSError:
    return OSError(
        error.errno, f"bootstrap server cannot listen on {config.host}:{config.port}: {error.strerror or error}"
    )


def _guard(secret: bytes | None) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get(SECRET_HEADER, "").encode(errors="replace")
        if secret is not None and request.path != "/health" and not hmac.compare_digest(sent, token(secret).encode()):
            return _fail(
                401, f"{SECRET_HEADER}: missing or wrong; start every worker with the same --cluster-secret-file"
            )
        return await handler(request)

    return guard


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RegistryError as error:
        return _fail(error.status, str(error))
    except web.HTTPRequestEntityTooLarge:
        return _fail(413, f"body: longer than {MAX_BODY_BYTES} bytes")
    except web.HTTPException as error:
        return _fail(error.status, f"{request.method} {request.path}: {error.reason}")


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
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
