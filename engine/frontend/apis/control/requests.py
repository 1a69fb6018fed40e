"""Running requests and their cache: abort, flush."""

import msgspec
from aiohttp import web

from engine.frontend.access import require
from engine.frontend.services import SERVICES
from service.http.errors import ApiError, bad_field, decode_body
from service.security.keys import Access


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


async def flush_cache(request: web.BaseRequest) -> web.Response:
    reply = await request[SERVICES].scheduler.flush_cache()
    if not reply.ok:
        raise ApiError(400, reply.message or "the cache cannot be flushed while requests run", code="not_idle")
    return web.Response(text=(reply.message or "Cache flushed.") + "\n")


async def abort_request(request: web.BaseRequest) -> web.Response:
    """200 also for an id that is not running, as SGLang does."""
    s = request[SERVICES]
    body = decode_body(await request.read() or b"{}", AbortBody)
    if body.abort_all:
        require(request, Access.ADMIN)
        s.client.abort_all()
    elif body.rid:
        s.client.abort(body.rid)
    else:
        raise bad_field("rid", "name a request, or set abort_all")
    return web.Response()
