"""HTTP routes of the registry."""

import time
import uuid
from collections.abc import Callable

from aiohttp import web

from bootstrap_server.config import BootstrapConfig
from bootstrap_server.metrics import BootstrapMetrics
from bootstrap_server.protocol import MAX_BUT, Registration, RegistrationReply, RoomBatch
from bootstrap_server.registry import Registry
from bootstrap_server.signatures import OPEN_PATHS, SignatureCheck
from service.http.errors import ApiError, decode_body
from service.http.guard import answer_of, make_guard
from service.http.routes import Handler, Routes
from service.http.stream import json_response
from service.security.browser import BrowserRule
from service.security.keys import Access, KeyGate, KeyRing
from service.security.signing import Verifier

NO_KEYS = KeyGate(KeyRing(), KeyRing(flag="--admin-api-key"))
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_handle(
    registry: Registry,
    *,
    config: BootstrapConfig,
    secret: bytes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Handler:
    """Return the request handler, which verifies and signs with a `secret`."""
    check = SignatureCheck(None if secret is None else Verifier(secret), clock)
    browser = BrowserRule(
        host=config.host,
        has_keys=secret is not None,
        allowed_hosts=config.allowed_hosts,
        key_flag="--cluster-secret-file",
    )
    metrics = BootstrapMetrics(registry, lambda: check.num_refused)
    routes = Routes(BootstrapHandlers(registry, clock, check, metrics).routes())
    for path, methods in routes.paths().items():
        for method in methods if path not in OPEN_PATHS else ():
            metrics.expect(f"{method} {path}")
    guard = make_guard(routes, gate=NO_KEYS, need_of=lambda method, path: Access.NONE, browser=browser)

    async def signed(request: web.BaseRequest) -> web.StreamResponse:
        return await check.answer(request, guard)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        response = await answer_of(signed, request)
        path = routes.of(request).path
        if path and path not in OPEN_PATHS:
            metrics.on_answered(f"{request.method} {path}", response.status)
        return response

    return handle


class BootstrapHandlers:
    def __init__(
        self, registry: Registry, clock: Callable[[], float], check: SignatureCheck, metrics: BootstrapMetrics
    ) -> None:
        self._check = check
        self._metrics = metrics
        self._registry = registry
        self._clock = clock
        self._server_id = uuid.uuid4().hex

    def routes(self) -> list[web.RouteDef]:
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
        return json_response(RegistrationReply(self._registry.lease_s, self._registry.shared, self._server_id))

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
