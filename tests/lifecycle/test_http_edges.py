"""Every server of ours before any handler: slashes and bytes that are no HTTP; and at its end, what was accepted."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from fastapi import Response

from service.http.errors import RequestLimits
from service.http.listening import open_port
from service.http.request import HttpRequest, asgi_app
from service.http.routes import json_response
from service.http.server import HttpServer, serving

LIMITS = RequestLimits(max_body_bytes=1 << 10)


async def echo(request: HttpRequest) -> Response:
    body = (await request.read()).decode()
    return json_response(
        {"path": request.path, "raw": request.raw_path, "query": request.target.partition("?")[2], "body": body}
    )


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that says what it was sent."""
    with open_port("127.0.0.1", 0) as port:
        async with serving(port, asgi_app(echo, LIMITS), LIMITS, shutdown_timeout_s=0.1):
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


HEAD = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"


async def handle(request: HttpRequest) -> Response:
    return json_response({"path": request.path})


async def answers_at_the_end(*requests: bytes) -> list[bytes]:
    """What a client reads that connected before the server's end and sends each of `requests` after it has begun."""
    with open_port("127.0.0.1", 0) as port:
        server = HttpServer(asgi_app(handle, LIMITS), LIMITS, shutdown_timeout_s=1)
        await server.serve(port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        while not server._state.connections:
            await asyncio.sleep(0)
        end = asyncio.create_task(server.close())
        while server._listeners:
            await asyncio.sleep(0)
        for _ in range(10):  # turns of the loop, in which the server could close the connection
            await asyncio.sleep(0)
        answers = []
        for request in requests:
            writer.write(request)
            answers.append(await asyncio.wait_for(reader.read(), 10))
        await asyncio.wait_for(end, 10)
        writer.close()
        return answers


async def test_a_connection_without_a_request_is_answered_once() -> None:
    (answer,) = await answers_at_the_end(HEAD)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert answer.endswith(b'{"path":"/a"}'), answer


async def test_a_silent_connection_does_not_keep_the_server() -> None:
    assert await answers_at_the_end() == []


@pytest.mark.parametrize("iterations", range(8))
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_is_answered_whenever_its_server_ends_by_it_or_by_the_next(
    new_loop: Callable[[], asyncio.AbstractEventLoop], iterations: int
) -> None:
    """`iterations`: of the loop, from the connection in the kernel's queue to the server's end."""

    async def answer() -> bytes:
        with open_port("127.0.0.1", 0) as port:
            servers = [HttpServer(asgi_app(handle, LIMITS), LIMITS, shutdown_timeout_s=1) for _ in "ab"]
            await servers[0].serve(port)
            with socket.create_connection(("127.0.0.1", port.port)) as client:
                client.sendall(HEAD)
                for _ in range(iterations):
                    await asyncio.sleep(0)
                await servers[0].close()
                await servers[1].serve(port)
                client.setblocking(False)
                received = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 16), 10)
            await servers[1].close()
            return received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(answer()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_a_server_writes_is_sent_at_once(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Otherwise a body would wait for its head's acknowledgement, which a client delays by 40 ms."""

    async def no_delay() -> int:
        made: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        with open_port("127.0.0.1", 0) as port:
            server = await asyncio.get_running_loop().create_server(Accepted, sock=port.sockets[0].dup())
            with socket.create_connection(("127.0.0.1", port.port)):
                found = await asyncio.wait_for(made, 10)
            server.close()
        return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(no_delay())
