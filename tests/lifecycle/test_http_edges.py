"""What every server of ours does with a request before any handler: a slash at the end of a path, and bytes that are no HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from service.http.listening import open_port
from service.http.server import RequestLimits, serving
from service.http.stream import json_response


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    body = (await request.read()).decode()
    return json_response(
        {"path": request.path, "raw": request.rel_url.raw_path, "query": request.query_string, "body": body}
    )


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that says what it was sent."""
    with open_port("127.0.0.1", 0) as port:
        async with serving(port, echo, RequestLimits(max_body_bytes=1 << 10), shutdown_timeout_s=0.1):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            yield reader, writer
            writer.close()


async def answer(data: bytes) -> tuple[bytes, bytes]:
    """(status line, body) of the answer to these bytes."""
    async with talking() as (reader, writer):
        writer.write(data)
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return head.partition(b"\r\n")[0], await reader.readexactly(length)


@pytest.mark.parametrize(
    ("target", "raw", "query"),
    [
        ("/", "/", ""),
        ("/a", "/a", ""),
        ("/a/", "/a", ""),
        ("/a/?b=/", "/a", "b=/"),
        ("/a?b=/", "/a", "b=/"),
        ("/a//", "/a", ""),
        ("//", "/", ""),
        ("/v1/models/a%2Fb/", "/v1/models/a/b", ""),
        ("/v1/models/%ED%A0%80/", "/v1/models/%ED%A0%80", ""),
        ("http://127.0.0.1:1/a/", "/a", ""),
        ("/?b", "/", "b"),
    ],
)
async def test_a_slash_at_the_end_names_the_same_route_and_the_body_stays(target: str, raw: str, query: str) -> None:
    head = f"POST {target} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}"
    status, body = await answer(head.encode())
    told = json.loads(body)
    assert status == b"HTTP/1.1 200 OK"
    assert (told["raw"], told["query"], told["body"]) == (raw, query, "{}")


@pytest.mark.parametrize(
    "junk",
    [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"G\xed\xa0\x80T / HTTP/1.1\r\n\r\n", b"\xff\xfe\r\n\r\n"],
)
async def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(junk: bytes) -> None:
    status, body = await answer(junk + b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert status.endswith(b" 400 Bad Request")
    assert error["code"] == "invalid_http" and "not HTTP/1.1" in error["message"]
