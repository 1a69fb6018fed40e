"""HTTP between a worker's frontends: forwarded requests, and calls of the main one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import Response
from yarl import URL

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
from service.http.reconnect import RETAINED_PATH, RetainedQuestion, RetainedRest
from service.http.request import Handler, HttpRequest, StreamedResponse
from service.http.routes import json_response, no_such_path
from service.telemetry.context import Records, TracesQuery

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
        yield partial(answer_of, partial(_forward, session))


async def _forward(session: aiohttp.ClientSession, request: HttpRequest) -> Response:
    body = await request.read()
    try:
        answer = await session.request(
            request.method,
            URL("http://main" + request.target, encoded=True),
            data=body or None,
            headers=_without(request.headers, _NOT_FORWARDED),
            skip_auto_headers=_OWN_HEADERS,
            allow_redirects=False,
        )
    except (aiohttp.ClientError, OSError):
        raise not_ready("the worker's main frontend does not answer; try again soon") from None
    async with answer:
        response = StreamedResponse(request, status=answer.status, headers=_without(answer.headers, _NOT_RETURNED))
        try:
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientError as error:
            raise ConnectionResetError("the main frontend ended in the middle of an answer") from error
        await response.end()
        return response


def _without(headers: Mapping[str, str], names: frozenset[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in names]


# ---- Internal API for the main frontend, on a private unix socket.


def make_internal_handle(s: Services) -> Handler:
    calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {  # path -> body, answer
        READY: (None, lambda _: s.leaders.check_ready()),
        METRICS: (None, lambda _: s.metrics.exposition()),  # without the schedulers', which only the main one gets
        TRACES: (TracesQuery, lambda query: Records(records=s.tracer.ring.find(query))),
        ABORT: (AbortName, lambda body: s.client.abort(body.name, owner=body.owner)),
        RETAINED_PATH: (RetainedQuestion, lambda question: _rest(s, question)),
        MOVE: (MoveName, lambda body: Moved(s.client.move_out(body.name, body.room, owner=body.owner))),
        REPLY: (RankReply, lambda change: s.leaders.on_message(change.reply, change.rank)),
        CLOSE: (CloseFrontend, lambda body: _close(s, body)),
    }

    async def call(request: HttpRequest) -> Response:
        if request.path not in calls:
            raise no_such_path(request)
        body_type, answer = calls[request.path]
        shown = answer(None if body_type is None else decode_body(await request.read(), body_type))
        return Response(content=shown) if isinstance(shown, bytes) else json_response(shown)

    return partial(answer_of, call)


def _rest(s: Services, question: RetainedQuestion) -> RetainedRest:
    rest = s.kept.rest(question, asyncio.get_running_loop().time())
    if rest is None:
        raise ApiError(404, "no such stream is kept here")
    return rest


def _close(s: Services, body: CloseFrontend) -> None:
    error = ApiError(body.status, body.message, code=body.code, retry_after_s=body.retry_after_s)
    (s.client.fail_all if body.fails_live else s.client.close)(error)
