"""The router's HTTP client against real sockets: a server that sends what the test says, byte by byte."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from router.client.upstream import MAX_HEAD_BYTES, HttpReply, HttpUpstream, UpstreamError
from tests.router.dummies import DEADLINE_S, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Say = Callable[[asyncio.StreamWriter], Awaitable[None]]


def says(*parts: bytes, then_close: bool = False) -> Say:
    async def say(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    return say


@dataclass
class Server:
    """Answers each request with the next of `script`, the last one again and again."""

    script: list[Say]
    requests: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.script.pop(0)(writer) if len(self.script) > 1 else await self.script[0](writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def upstream(*script: Say, timeout_s: float = 30.0) -> AsyncIterator[tuple[HttpUpstream, Server]]:
    server = Server(list(script))
    listening = await asyncio.start_server(server.on_connection, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = HttpUpstream(connect_timeout_s=5.0, request_timeout_s=timeout_s)
    try:
        yield client, server
    finally:
        await client.close()
        listening.close()
        await listening.wait_closed()


def post(client: HttpUpstream, server: Server, body: bytes = b"{}") -> HttpReply:
    return client.post(server.url, "/generate", headers={"X-Request-Id": "a"}, body=body)


async def whole(reply: HttpReply) -> bytes:
    parts = []
    async with asyncio.timeout(DEADLINE_S):
        while part := await reply.readany():
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([OK], b"ok"),
        ([bytes([b]) for b in OK], b"ok"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], b"ok"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", b"1\r\n!\r\n0\r\n\r\n"], b"ok!"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], b""),
    ],
)
async def test_answers_of_every_shape(parts: list[bytes], expected: bytes) -> None:
    async with upstream(says(*parts)) as (client, server):
        for _ in range(2):
            reply = post(client, server)
            assert await whole(reply) == expected and reply.complete and reply.status in (200, 204)
        assert server.num_connections == 1, "the connection was not kept"
        assert server.requests[0].startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with upstream(says(b"HTTP/1.1 200 OK\r\n\r\nab", b"cd", then_close=True)) as (client, server):
        assert await whole(post(client, server)) == b"abcd"
        await until(lambda: len(client.connections) == 0)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"],
        [b"this is no HTTP\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nX: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"],
    ],
)
async def test_a_broken_answer_is_an_error_and_its_connection_is_closed(parts: list[bytes]) -> None:
    async with upstream(says(*parts, then_close=True), says(OK)) as (client, server):
        with pytest.raises(UpstreamError) as caught:
            await whole(post(client, server))
        assert caught.value.reason == "lost"
        await until(lambda: len(client.connections) == 0)
        assert await whole(post(client, server)) == b"ok"


async def test_nothing_listens() -> None:
    async with upstream(says(OK)) as (client, server):
        url = server.url
    client = HttpUpstream(connect_timeout_s=5.0, request_timeout_s=5.0)
    reply = client.post(url, "/generate", headers={}, body=b"{}")
    heard: list[str] = []
    reply.listener = lambda: heard.append("changed")
    with pytest.raises(UpstreamError) as caught:
        await whole(reply)
    assert caught.value.reason == "refused" and heard == ["changed"]
    await client.close()


async def test_an_answer_that_does_not_come_in_time() -> None:
    async with upstream(says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na"), timeout_s=0.05) as (client, server):
        with pytest.raises(UpstreamError) as caught:
            await whole(post(client, server))
        assert caught.value.reason == "timeout" and "--request-timeout-secs" in str(caught.value)
        async with asyncio.timeout(DEADLINE_S):
            await server.gone.wait()


async def test_closing_a_reply_ends_its_connection_and_nothing_else() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na"
    async with upstream(says(head), says(OK)) as (client, server):
        reply = post(client, server)
        assert await reply.readany() == b"a"
        reply.close()
        assert reply.error is not None and not reply.complete
        async with asyncio.timeout(DEADLINE_S):
            await server.gone.wait()
        done = post(client, server)
        assert await whole(done) == b"ok"
        done.close()
        assert done.error is None
        assert await whole(post(client, server)) == b"ok"
        assert server.num_connections == 2


async def test_a_reply_closed_before_its_connection_is_made_sends_nothing() -> None:
    async with upstream(says(OK)) as (client, server):
        reply = post(client, server)
        reply.close()
        assert await whole(post(client, server)) == b"ok"
        assert len(server.requests) == 1


@pytest.mark.parametrize("say", [says(OK + OK), says(OK, then_close=True)], ids=["out of turn", "closed"])
async def test_a_connection_that_speaks_out_of_turn_or_was_closed_is_not_used_again(say: Say) -> None:
    async with upstream(say, says(OK)) as (client, server):
        assert await whole(post(client, server)) == b"ok"
        await until(lambda: len(client.connections) == 0)
        assert await whole(post(client, server)) == b"ok"
        assert server.num_connections == 2


async def test_a_connection_that_is_free_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.client.upstream.KEEPALIVE_S", 0.05)

    async with upstream(says(OK)) as (client, server):
        assert await whole(post(client, server)) == b"ok"
        await until(lambda: len(client.connections) == 0)
        async with asyncio.timeout(DEADLINE_S):
            await server.gone.wait()


async def test_a_header_of_two_lines_is_refused() -> None:
    async with upstream(says(OK)) as (client, server):
        with pytest.raises(ValueError, match="line break"):
            client.post(server.url, "/generate", headers={"X": "a\r\nB: c"}, body=b"")
        assert not server.requests


async def test_headers_are_those_of_the_request_also_where_the_last_one_had_others() -> None:
    async with upstream(says(OK), says(OK), says(OK)) as (client, server):
        first, second = {"X-Request-Id": "a"}, {"X-Request-Id": "b", "Traceparent": "t"}
        for headers in (first, first, second):
            reply = client.post(server.url, "/generate", headers=headers, body=b"")
            assert await whole(reply) == b"ok"
        heads = [str(request).count("X-Request-Id: a") for request in server.requests]
        assert heads == [1, 1, 0] and "Traceparent: t" in str(server.requests[2])
