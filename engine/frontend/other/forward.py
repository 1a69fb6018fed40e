"""Forwards requests to the main frontend, which applies keys, metrics and logs."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from engine.frontend.errors import not_ready
from service.http.guard import answer_of
from service.http.routes import Handler

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
