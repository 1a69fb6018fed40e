"""Internal API for the main frontend, on a private unix socket."""

import asyncio

from aiohttp import web

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
from engine.frontend.errors import not_ready
from engine.frontend.services import Services
from service.http.errors import ApiError, decode_body
from service.http.guard import answer_of
from service.http.reconnect import KEPT_PATH, KeptQuestion
from service.http.routes import Handler, Routes
from service.http.stream import json_response
from service.telemetry.records import Records, TracesQuery


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
        question = decode_body(await request.read(), KeptQuestion)
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
            web.post(KEPT_PATH, kept),
            web.post(MOVE, move),
            web.post(REPLY, reply),
            web.post(CLOSE, close),
        ]
    )

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await answer_of(routes.of(request).handler, request)

    return handle
