"""Workers for router tests: real aiohttp servers on real sockets whose behaviour a test scripts."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import aiohttp
from aiohttp import web

from router.choice.prefix_index import PrefixIndex
from router.compose.router import Router
from router.config import RouterConfig
from router.pool.breaker import Check
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.server import start_router
from service.http import heartbeats
from service.http.errors import RequestLimits
from service.http.guard import CALLER_HEADER
from service.http.resume import MOVE_OUT, RESUME_FIELD
from service.security.keys import ROUTER_SECRET

DEADLINE_S = 60.0
MEETS_S = 2.0
BOOTSTRAP_PORT = 8998  # of each prefill worker, as it says
SECRET = "the secret of dummies and router"
CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}

Behaviour = Callable[["DummyWorker", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    path: str
    headers: dict[str, str]  # names in lower case
    body: dict[str, Any]


async def answer_ok(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Streams three events if asked, else one JSON object that names the worker."""
    if not body.get("stream"):
        return web.json_response({"from": worker.name, "choices": []})
    return await stream(request, [{"from": worker.name, "i": i} for i in range(3)])


async def begin_stream(request: web.Request, first: bytes = b'data: {"i": 0}\n\n') -> web.StreamResponse:
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await out.prepare(request)
    await out.write(first)
    return out


async def stream(request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
    """All of it."""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    out = await begin_stream(request, b"".join(lines) + b"data: [DONE]\n\n")
    await out.write_eof()
    return out


def always(status: int, body: dict[str, Any], **headers: str) -> Behaviour:
    async def behave(worker: "DummyWorker", request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return behave


@dataclass
class DummyWorker:
    """`behave` answers generation requests; `seen` holds those that came, `cancelled` counts those that were taken back."""

    name: str
    mode: str
    behave: Behaviour = answer_ok
    healthy: bool = True
    draining: bool = False  # says so on /health
    frozen: bool = False  # /health gets no answer, no heartbeat comes
    beats_s: float = 0.0  # between two heartbeats; 0: it knows none
    beat: bytes = heartbeats.IDLE  # b"": it is lost on its way
    incarnation: str = ""
    health_says: dict[str, Any] = field(default_factory=dict)  # beside its incarnation
    info: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] | None = None
    loads: dict[str, Any] | None = None  # of /v1/loads
    openapi: dict[str, Any] | None = None
    seen: list[Seen] = field(default_factory=list)
    rooms: set[int] | None = None  # that prefill workers have, of all workers of a cluster; None: decode waits for none
    calls: list[tuple[str, str]] = field(default_factory=list)
    aborts: list[tuple[str | None, str | None]] = field(default_factory=list)  # whose key was shown, whose the name is
    models: list[dict[str, Any]] | None = None  # of /v1/models; None: one of its own name
    lets_go: Callable[[list[dict[str, Any]]], list[str]] | None = None  # of /move_out: samples -> those that move
    owners: list[str] = field(default_factory=list)  # of the names in orders to move
    cancelled: int = 0
    num_checks: int = 0
    num_streams: int = 0  # of heartbeats, so far
    beating: list[asyncio.Transport] = field(default_factory=list)  # their connections
    num_loads: int = 0  # asked for
    port: int = 0
    given_port: int | None = None  # its bootstrap port, as the router is given it; 0: the port of its HTTP
    host: str = "127.0.0.1"
    runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, self.host, self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        for transport in self.beating:
            transport.abort()
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await runner.cleanup()

    def _bootstrap(self) -> dict[str, Any]:
        return {"disaggregation_bootstrap_port": BOOTSTRAP_PORT} if self.mode == "prefill" else {}

    async def _beat(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.beating.append(request.transport)
        out = await begin_stream(request, heartbeats.first_line(self.beats_s))
        while True:
            await asyncio.sleep(self.beats_s)
            if self.beat and not self.frozen:
                await out.write(self.beat)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.num_checks += request.path == "/health"
        self.num_loads += request.path == "/v1/loads"
        if request.path == heartbeats.PATH:
            self.num_streams += 1
            if self.beats_s:
                return await self._beat(request)
        if request.path == "/health" and self.draining:
            return web.json_response({"status": "draining"}, status=503)
        if request.path == "/health" and self.frozen:
            await asyncio.Event().wait()
        if request.path == "/health":
            said = {**({"incarnation": self.incarnation} if self.incarnation else {}), **self.health_says}
            return web.json_response(said, status=200 if self.healthy else 503)
        if request.path == "/server_info":
            return web.json_response({"disaggregation_mode": self.mode, **self._bootstrap(), **self.info})
        if request.path == "/get_load" and self.load is not None:
            return web.json_response(self.load)
        if request.path == "/openapi.json" and self.openapi is not None:
            return web.json_response(self.openapi)
        if request.path == "/v1/loads" and self.loads is not None:
            return web.json_response(self.loads)
        if request.path == "/abort_request":
            self.aborts.append((request.headers.get("Authorization"), request.headers.get(CALLER_HEADER)))
        if request.path == "/get_weight_version":
            return web.json_response({"weight_version": self.name})
        if request.path in ("/v1/models", "/flush_cache", "/abort_request", "/get_model_info", "/health_generate"):
            self.calls.append((request.path, await request.text()))
            return web.json_response({"data": self.models or [{"id": self.name}]})
        if request.path in ("/api/tags", "/api/ps"):
            return web.json_response({"models": [{"name": self.name}]})
        if request.path == "/api/version":
            return web.json_response({"version": self.name})
        if request.path.startswith("/v1/models/"):
            said = {"id": request.path.removeprefix("/v1/models/"), "from": self.name, "sent_as": request.raw_path}
            return web.json_response(said)
        if request.method not in ("POST", "PUT"):
            return web.Response(status=404)
        body = await request.json()
        if request.path == MOVE_OUT:
            if self.lets_go is None:
                return web.Response(status=404)
            self.owners.append(body["owner"])
            return web.json_response({"moving": self.lets_go(body["samples"])})
        self.seen.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, body))
        try:
            await self._meet(body)
            return await self.behave(self, request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _meet(self, body: dict[str, Any]) -> None:
        """As real pairs: decode has nothing to answer before prefill has the request. Where that does not come, it goes on alone."""
        if RESUME_FIELD in body:  # its KV may come from another decode worker
            return
        given, came = body.get("bootstrap_room"), self.rooms
        rooms = {room for room in (given if isinstance(given, list) else [given]) if isinstance(room, int)}
        if came is not None and self.mode == "prefill":
            came |= rooms
        elif came is not None and self.mode == "decode":
            with suppress(TimeoutError):
                async with asyncio.timeout(MEETS_S):
                    await until(lambda: rooms <= came)


@dataclass
class Cluster:
    router: Router
    prefills: list[DummyWorker]
    decodes: list[DummyWorker]
    client: aiohttp.ClientSession
    alone: list[DummyWorker] = field(default_factory=list)  # unified ones beside pairs
    encoders: list[DummyWorker] = field(default_factory=list)

    def state(self, worker: DummyWorker) -> Worker:
        """What the router knows of `worker`."""
        return self.router.table.find(worker.url)

    @property
    def url(self) -> str:
        return self.router.url

    async def post(self, path: str, body: Any, **kw: Any) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **kw.pop("headers", {})}
        async with self.client.post(self.url + path, data=data, headers=headers, **kw) as response:
            return response.status, dict(response.headers), await response.read()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """(status, body; decoded if it is a JSON object)."""
        async with self.client.get(self.url + path, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def begin(self, body: Any, *at: DummyWorker, path: str = CHAT_PATH, **kw: Any) -> "asyncio.Task[Any]":
        """The answer to come to a request that the workers `at` have received."""
        before = [len(worker.seen) for worker in at]
        task = asyncio.create_task(self.post(path, body, **kw))
        await until(lambda: all(len(worker.seen) > count for worker, count in zip(at, before, strict=True)))
        return task

    async def first_byte(self) -> None:
        """Wait until the oldest request's answer has begun."""
        live = self.router.live.requests
        await until(lambda: live and next(iter(live)).first_byte_s is not None)

    async def remove(self, worker: DummyWorker) -> int:
        """The status of DELETE /workers."""
        async with self.client.delete(self.url + "/workers", params={"url": worker.url}) as response:
            return response.status

    async def remove_by_path(self, named: str) -> int:
        """The status of DELETE /workers/{id or URL}, as SGLang's clients write it."""
        async with self.client.delete(f"{self.url}/workers/{quote(named, safe='')}") as response:
            return response.status

    def behave(self, behave: Behaviour) -> None:
        """From now on, of both workers of every pair."""
        for worker in (*self.prefills, *self.decodes):
            worker.behave = behave

    async def metrics(self) -> list[str]:
        return str((await self.get("/metrics"))[1]).splitlines()

    async def shows(self, metric: str) -> None:
        """Wait until /metrics has this line."""

        async def shown() -> bool:
            return metric in await self.metrics()

        await until(shown)

    async def settled(self) -> None:
        """Wait until nothing is in flight, then check that all was given back."""
        await until(lambda: self.router.table.loads.num_leases == 0 and self.router.rooms.num_live == 0)
        self.router.table.check()
        self.router.rooms.check()
        await until(lambda: not any(worker.calls for worker in self.router.table.workers()))


async def until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, or of what it awaits."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            value = condition()
            value = await value if asyncio.iscoroutine(value) else value
            if value:
                return value
            await asyncio.sleep(0.005)


Workers = int | Sequence[Behaviour | DummyWorker]  # how many, or what each does, or each itself


@asynccontextmanager
async def workers(count: Workers, *, mode: str) -> AsyncIterator[list[DummyWorker]]:
    given: Sequence[Behaviour | DummyWorker] = [answer_ok] * count if isinstance(count, int) else count
    started = [w if isinstance(w, DummyWorker) else DummyWorker(f"{mode}-{i}", mode, w) for i, w in enumerate(given)]
    async with AsyncExitStack() as stack:
        for worker in started:
            await worker.start()
            stack.push_async_callback(worker.stop)
        yield started


@asynccontextmanager
async def cluster(
    *,
    prefill: Workers = 1,
    decode: Workers = 1,
    unified: Workers = 0,
    unified_beside: int = 0,
    encode: int = 0,
    info: dict[str, Any] | None = None,
    beats_s: float = 0.0,
    secret: str = SECRET,
    limits: RequestLimits | None = None,
    **flags: Any,
) -> AsyncIterator[Cluster]:
    """Dummies and a router in front of them; when the test has passed, everything must come to rest.

    `prefill`, `decode`, `unified`: see `Workers`. `unified` makes it a plain router; `unified_beside`: unified workers beside pairs.
    `beats_s`: of all. `secret`: of the router, as `tandem up` gives it; "": none.
    """
    settings: dict[str, Any] = {"port": 0, "health_check_interval_s": 0.05, "load_poll_interval_s": 0.05}
    async with AsyncExitStack() as stack:
        if unified:
            prefills: list[DummyWorker] = []
            decodes = await stack.enter_async_context(workers(unified, mode="null"))
            settings["worker_urls"] = tuple(w.url for w in decodes)
        else:
            prefills = await stack.enter_async_context(workers(prefill, mode="prefill"))
            decodes = await stack.enter_async_context(workers(decode, mode="decode"))
            settings |= {
                "pd_disaggregation": True,
                "prefill": tuple((w.url, w.port if w.given_port == 0 else w.given_port) for w in prefills),
                "decode": tuple(w.url for w in decodes),
            }
        alone: list[DummyWorker] = []
        if unified_beside:
            alone = await stack.enter_async_context(workers(unified_beside, mode="null"))
            settings["worker_urls"] = tuple(w.url for w in alone)
        encoders = await stack.enter_async_context(workers(encode, mode="encode"))
        settings["encode"] = tuple(w.url for w in encoders)
        for worker in encoders:
            worker.info["image_encoder"] = json.dumps({"control": f"{worker.name}:1", "incarnation": worker.name})
        for worker in (*prefills, *decodes, *alone) if encode else ():
            worker.info["feature_fetch"] = True
        rooms = set[int]()
        for worker in (*prefills, *decodes, *alone, *encoders):
            worker.info.update(info or {})
            worker.beats_s, worker.rooms = beats_s, rooms
        with patch.dict(os.environ, {ROUTER_SECRET: secret}):
            router = await stack.enter_async_context(start_router(RouterConfig(**{**settings, **flags}), limits=limits))
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        c = Cluster(router, prefills, decodes, client, alone, encoders)
        yield c
        await c.settled()


def key_file(folder: Path, *keys: str) -> str:
    """A file with these keys, as --api-key-file takes it."""
    (folder / "keys").write_text("".join(f"{key}\n" for key in keys))
    return str(folder / "keys")


def events_of(body: bytes) -> list[Any]:
    """The events of a stream; [DONE] as it is. Fails on anything that does not parse."""
    lines = [line for line in body.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines), lines
    return ["[DONE]" if line == b"data: [DONE]" else json.loads(line[6:]) for line in lines]


def depths(index: PrefixIndex, keys: Sequence[Hashable]) -> dict[int, int]:
    """Worker id -> how many of `keys` it has, of those that have any."""
    matched = index.match(keys)
    return {worker_id: depth for depth, bits in matched.groups for worker_id in matched.ids(bits)}


def no_draw(count: int) -> int:
    """The draw of a policy that compares all workers of its pools."""
    raise AssertionError(f"a pool of {count} workers is drawn from")


def table_of(count: int = 0, *, role: Role = Role.DECODE, roles: Sequence[Role] = ()) -> WorkerTable:
    """`count` workers of one role, or of `roles`, all up."""
    table = WorkerTable()
    for i, each in enumerate(roles or [role] * count):
        table.on_check(table.add(f"http://h{i}:1", role=each), Check.OK, now_s=0.0)
    return table
