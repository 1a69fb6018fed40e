"""Runs an additional frontend on the same port, until the main one ends it."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from engine.frontend.app import HTTP_CLOSE_S, SPARE_REQUESTS, make_handle
from engine.frontend.assembly import make_services
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.other_frontends import (
    ABORT,
    CLOSE,
    METRICS,
    MOVE,
    READY,
    REPLY,
    TRACES,
    AbortName,
    CloseFrontend,
    Moved,
    MoveName,
    RankReply,
)
from engine.frontend.client.scheduler_link import SchedulerLink, open_sockets
from engine.frontend.client.shared_requests import SharedRequests
from engine.frontend.errors import not_ready
from engine.frontend.routes import ROUTES
from engine.frontend.services import Services
from engine.frontend.spec import FrontendSlot, FrontendSpec, limits_of
from engine.ipc import MAIN_FRONTEND, IpcPaths
from engine.stamps import Stamp
from service.http.api_shapes import json_response
from service.http.errors import ApiError, decode_body
from service.http.guard import answer_of
from service.http.heartbeats import EVERY_S, STAMPS, wait_s
from service.http.listening import ListeningPort
from service.http.reconnect import RETAINED_PATH, RetainedQuestion
from service.http.routes import Handler, Routes
from service.http.server import serving, serving_unix
from service.process.start import spare_what_lives
from service.security.keys import KeyGate
from service.telemetry.records import Records, TracesQuery
from service.waiter import end_tasks

# ---- Forwards requests to the main frontend, which applies keys, metrics and logs.

# Hop-by-hop headers (RFC 9110, 7.6.1), and those of the body's encoding.
_NOT_FORWARDED = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("expect", "content-length", "content-encoding"),
    )
)
_NOT_RETURNED = frozenset(("connection", "keep-alive", "transfer-encoding"))
_OWN_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # added by aiohttp


@asynccontextmanager
async def forwarding_to(path: Path) -> AsyncIterator[Handler]:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.UnixConnector(path=str(path), limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            return await _forward(session, request)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await answer_of(forward, request)

        yield handle


async def _forward(session: aiohttp.ClientSession, request: web.BaseRequest) -> web.StreamResponse:
    body = await request.read()
    try:
        answer = await session.request(
            request.method,
            URL("http://main" + request.rel_url.raw_path_qs, encoded=True),
            data=body or None,
            headers=_without(request.headers, _NOT_FORWARDED),
            skip_auto_headers=_OWN_HEADERS,
            allow_redirects=False,
        )
    except (aiohttp.ClientError, OSError):
        raise not_ready("the worker's main frontend does not answer; try again soon") from None
    async with answer:
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        response.headers.extend(_without(answer.headers, _NOT_RETURNED))
        await response.prepare(request)
        try:
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientError as error:
            raise ConnectionResetError("the main frontend ended in the middle of an answer") from error
        await response.write_eof()
        return response


def _without(headers: Mapping[str, str], names: frozenset[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in names]


# ---- Internal API for the main frontend, on a private unix socket.


def make_internal_handle(s: Services) -> Handler:
    async def ready(request: web.BaseRequest) -> web.Response:
        if not s.leaders.ready.is_set():
            raise not_ready("the model is still loading")
        return web.Response()

    async def metrics(request: web.BaseRequest) -> web.Response:
        """All but the scheduler's messages, which only the main frontend gets."""
        return web.Response(body=s.metrics.exposition())

    async def traces(request: web.BaseRequest) -> web.Response:
        query = decode_body(await request.read(), TracesQuery)
        return json_response(Records(records=s.tracer.ring.find(query)))

    async def abort(request: web.BaseRequest) -> web.Response:
        body = decode_body(await request.read(), AbortName)
        s.client.abort(body.name, owner=body.owner)
        return web.Response()

    async def kept(request: web.BaseRequest) -> web.Response:
        question = decode_body(await request.read(), RetainedQuestion)
        rest = s.kept.rest(question, asyncio.get_running_loop().time())
        return web.Response(status=404) if rest is None else json_response(rest)

    async def move(request: web.BaseRequest) -> web.Response:
        body = decode_body(await request.read(), MoveName)
        return json_response(Moved(s.client.move_out(body.name, body.room, owner=body.owner)))

    async def reply(request: web.BaseRequest) -> web.Response:
        change = decode_body(await request.read(), RankReply)
        s.leaders.on_message(change.reply, change.rank)
        return web.Response()

    async def close(request: web.BaseRequest) -> web.Response:
        body = decode_body(await request.read(), CloseFrontend)
        error = ApiError(body.status, body.message, code=body.code, retry_after_s=body.retry_after_s)
        (s.client.fail_all if body.fails_live else s.client.close)(error)
        return web.Response()

    routes = Routes(
        [
            web.get(READY, ready),
            web.get(METRICS, metrics),
            web.post(TRACES, traces),
            web.post(ABORT, abort),
            web.post(RETAINED_PATH, kept),
            web.post(MOVE, move),
            web.post(REPLY, reply),
            web.post(CLOSE, close),
        ]
    )

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await answer_of(routes.of(request).handler, request)

    return handle


# ---- server


async def run_other_frontend(
    spec: FrontendSpec, *, row: int, ipc: IpcPaths, gate: KeyGate, port: ListeningPort, ended: asyncio.Event
) -> None:
    """Serve until `ended`. Raises ConfigError for an unusable checkpoint."""
    loop, limits = asyncio.get_running_loop(), limits_of(spec.server)
    num_rows, dp_size = spec.server.tokenizer_worker_num, spec.engine.dp_size
    shared = SharedRequests(ipc.dir, row=row, num_rows=num_rows, num_ranks=dp_size)
    with ExitStack() as stack:
        sockets = [stack.enter_context(open_sockets(paths, row=row)) for paths in ipc.of_ranks(dp_size)]
        leaders = Leaders([SchedulerLink(send, loop.time, row=row) for send, _ in sockets])
        slot = FrontendSlot(row=row, shared=shared)
        s = make_services(spec, leaders=leaders, gate=gate, dead=lambda: None, slot=slot)
        for rank, (_, pull) in enumerate(sockets):
            pull.attach(loop, s.client.of_rank(rank))
        async with _handling(s, ipc) as handle:
            internal = make_internal_handle(s)
            async with (
                serving_unix(ipc.http_socket(row), internal, limits, shutdown_timeout_s=HTTP_CLOSE_S),
                serving(port, handle, limits, shutdown_timeout_s=HTTP_CLOSE_S),
            ):
                tasks = [asyncio.create_task(one) for one in (_settle(s), _stamp(Stamp(ipc.dir, f"frontend {row}")))]
                await ended.wait()
                await end_tasks(tasks)
        s.close()
        shared.close()


@asynccontextmanager
async def _handling(s: Services, ipc: IpcPaths) -> AsyncIterator[Handler]:
    own = make_handle(s, max_open=s.client.max_live + SPARE_REQUESTS)
    of_main = Routes(web.route(route.method, route.path, route.handler) for route in ROUTES if not route.anywhere)
    async with forwarding_to(ipc.http_socket(MAIN_FRONTEND)) as forward:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            is_of_main = of_main.find(request.method, request.path).path != ""
            return await (forward if is_of_main else own)(request)

        yield handle


async def _settle(s: Services) -> None:
    await s.leaders.ready.wait()
    spare_what_lives()


async def _stamp(stamp: Stamp) -> None:
    while True:
        stamp.write(time.monotonic())
        await asyncio.sleep(wait_s(time.monotonic(), EVERY_S, phase=STAMPS))
