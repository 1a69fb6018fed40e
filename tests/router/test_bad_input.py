"""Clients and callers that send nonsense, too much, or too slowly: each gets its answer, and nothing else suffers."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.pool.workers import same_url
from service.http.errors import RequestLimits
from tests.router.behaviours import later
from tests.router.dummies import DEADLINE_S, Cluster, cluster

SHORT = RequestLimits(max_body_bytes=64 << 20, header_timeout_s=0.5, body_timeout_s=0.5)
HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def talking(c: Cluster, said: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = c.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(said)
        async with asyncio.timeout(DEADLINE_S):
            yield reader, writer
    finally:
        writer.close()


async def answer_to(c: Cluster, said: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer; the connection is open until both are here."""
    async with talking(c, said) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        return head, await reader.readexactly(int(length[1]))


async def still_serves(c: Cluster) -> None:
    assert (await c.post("/generate", {"text": "a"}))[0] == 200
    await c.settled()


@pytest.mark.parametrize("said", [b"", b"POST /gen", HEAD], ids=["nothing", "half a line", "no end"])
async def test_a_head_that_does_not_come_ends_the_connection(said: bytes) -> None:
    async with cluster(limits=SHORT) as c:
        async with talking(c, said) as (reader, _):
            assert await reader.read() == b""
        await still_serves(c)


async def test_so_does_a_second_head() -> None:
    async with cluster(limits=SHORT) as c:
        first = HEAD + b'Content-Length: 13\r\n\r\n{"text": "a"}'
        async with talking(c, first) as (reader, writer):
            assert (await reader.readuntil(b'"choices": []}')).startswith(b"HTTP/1.1 200")
            writer.write(b"GET /health HTTP/1.1\r\nX: ")
            assert await reader.read() == b""
        await still_serves(c)


async def test_a_body_that_does_not_come_is_a_408_and_closes_the_connection() -> None:
    async with cluster(limits=SHORT) as c:
        head, body = await answer_to(c, HEAD + b'Content-Length: 1000\r\n\r\n{"text": ')
        assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
        assert "within 0.5 s" in json.loads(body)["error"]["message"]
        assert not c.prefills[0].seen
        await still_serves(c)


async def test_a_request_that_takes_longer_than_its_head_may_is_served() -> None:
    """The deadlines are for what the client sends, not for the answer."""
    gate = asyncio.Event()
    async with cluster(decode=[later(gate)], limits=SHORT) as c:
        job = await c.begin({"text": "a", "stream": True}, c.decodes[0], path="/generate")
        async with talking(c, b"") as (reader, _):  # when its deadline has passed, ours has, too
            assert await reader.read() == b""
        gate.set()
        assert (await job)[0] == 200


async def test_a_body_of_100_mb_is_refused_by_its_length_unread() -> None:
    async with cluster() as c:
        head, body = await answer_to(c, HEAD + b"Content-Length: 104857600\r\n\r\n" + b"x" * 65536)
        assert head.startswith(b"HTTP/1.1 413") and b"--max-body-bytes" in body
        assert not c.prefills[0].seen
        await still_serves(c)


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://Host:80/", "http://host"),
        ("HTTP://host:8000", "http://host:8000"),
        ("https://host:443", "https://host"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_an_address_is_written_in_one_way(url: str, same: str) -> None:
    assert same_url(url) == same_url(same)


def test_other_addresses_are_others() -> None:
    urls = ["http://host:443", "https://host", "http://host", "http://host:8000", "http://other", "http://[::1]"]
    assert len({same_url(url) for url in urls}) == len(urls)


async def test_flags_name_hosts_and_sites_that_may() -> None:
    async with cluster(allowed_hosts=("llm.example",), allowed_origins=("https://ops.example",)) as c:

        async def status(host: str, origin: str) -> int:
            return (await c.post("/generate", {"text": "a"}, headers={"Host": host, "Origin": origin}))[0]

        assert await status("llm.example", "https://ops.example") == 200
        assert await status("other.example", "https://ops.example") == 403
        assert await status("llm.example", "https://other.example") == 403
        await still_serves(c)
