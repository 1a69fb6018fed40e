"""A silent stream is kept open by comments; they are no answer, so the request may still move, and fail in a last event."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from service.http.keep_alive import NO_BEATS_HEADER
from service.http.routes import COMMENT, PING, shape_of
from tests.router.behaviours import hang, later, pauses
from tests.router.dummies import CHAT, STREAM, Cluster, DummyWorker, always, answer_ok, cluster, until

PATH = "/v1/chat/completions"
BEATS: dict[str, Any] = {"sse_keep_alive_interval_s": 0.04}
SELDOM: dict[str, Any] = {"sse_keep_alive_interval_s": 60.0}  # no answer takes as long


@asynccontextmanager
async def asked(c: Cluster, path: str = PATH, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    async with c.client.post(c.url + path, json=STREAM, headers=headers) as response:
        yield response


def data(body: bytes) -> list[Any]:
    """Events without comments; no comment stands inside an event."""
    parts = [part for part in body.split(b"\n\n") if part]
    assert all(part.startswith((b"data: ", b": ")) for part in parts), parts
    lines = [part[6:] for part in parts if part.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_request_whose_client_got_comments_alone_still_moves(status: int) -> None:
    """The first worker fails once comments have left; the second answers, or fails for good."""
    async with cluster(decode=2, retry_max=1, **BEATS) as c:
        first, second = c.decodes
        fail, may_fail = always(500, {"error": {"message": "no memory"}}), asyncio.Event()
        first.behave, second.behave = later(may_fail, fail), answer_ok if status == 200 else fail
        async with asked(c, **{"X-Request-Id": "mine"}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            assert response.headers["X-Request-Id"] == "mine"
            assert await response.content.readuntil(b"\n\n") == COMMENT
            may_fail.set()
            events = data(await response.read())
        assert len(second.seen) == 1
        if status == 200:
            assert [event["from"] for event in events[:-1]] == [second.name] * 3 and events[-1] == "[DONE]"
        else:
            (error,) = events
            assert error["error"]["message"] == "no memory" and error["error"]["code"] == 500
        (record,) = c.router.recorder.snapshot().records
        assert record.status == 200 and (record.failure == "") is (status == 200)


async def test_pauses_between_events_are_filled_and_busy_streams_are_not() -> None:
    go_on = asyncio.Event()
    async with cluster(decode=[pauses(go_on)], **BEATS) as c:
        async with asked(c) as response:
            assert data(await response.content.readuntil(b'data: {"i": 0}\n\n')) == [{"i": 0}]
            assert [await response.content.readuntil(b"\n\n") for _ in range(3)] == [COMMENT] * 3
            go_on.set()
            assert data(await response.read()) == [{"i": 1}, "[DONE]"]
        assert c.decodes[0].seen[0].headers[NO_BEATS_HEADER] == "1"
    async with cluster(**SELDOM) as c:
        assert b": keep" not in (await c.post(PATH, STREAM))[2]


async def test_an_error_before_the_first_comment_keeps_its_status() -> None:
    async with cluster(decode=[always(429, {"error": {"message": "full"}})], **SELDOM) as c:
        assert (await c.post(PATH, STREAM))[0] == 429


async def test_an_answer_that_is_whole_or_unwanted_gets_no_comment() -> None:
    """JSON has none, and without an interval there is none: while another stream gets three."""
    async with cluster(**BEATS) as c, cluster(sse_keep_alive_interval_s=0.0) as without:
        may_go = asyncio.Event()
        c.decodes[0].behave = without.decodes[0].behave = later(may_go)
        others = [asyncio.create_task(c.post(PATH, CHAT)), asyncio.create_task(without.post(PATH, STREAM))]
        await until(lambda: len(c.decodes[0].seen) == len(without.decodes[0].seen) == 1)
        async with asked(c) as response:
            assert [await response.content.readuntil(b"\n\n") for _ in range(3)] == [COMMENT] * 3
            may_go.set()
        for other in others:
            status, _, body = await other
            assert status == 200 and b": keep" not in body


async def test_an_answer_without_a_stream_is_one_event() -> None:
    async def whole(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text='{\n "choices": []\n}', content_type="application/json")

    may_go = asyncio.Event()
    async with cluster(decode=[later(may_go, whole)], **BEATS) as c, asked(c) as response:
        assert await response.content.readuntil(b"\n\n") == COMMENT
        may_go.set()
        assert data(await response.read()) == [{"choices": []}]


@pytest.mark.parametrize("end", ["drained", "left"])
async def test_a_request_that_only_waits_ends_with_its_router_or_its_client(end: str) -> None:
    async with cluster(decode=[hang], prefill=[hang], **BEATS, drain_timeout_s=0.0) as c:
        async with asked(c) as response:
            assert await response.content.readuntil(b"\n\n") == COMMENT
            if end == "drained":
                await c.router.live.drain(timeout_s=0.0, at_once=asyncio.Event())
                (error,) = data(await response.read())
                assert error["error"]["code"] == "draining"
        await until(lambda: c.decodes[0].cancelled)


async def test_a_queue_is_silence_too() -> None:
    flags = {**BEATS, "max_concurrent_requests": 1, "queue_size": 1, "queue_timeout_s": 0.2}
    async with cluster(decode=[hang], **flags) as c, asked(c):
        await until(lambda: c.decodes[0].seen)
        async with asked(c) as waits:
            assert await waits.content.readuntil(b"\n\n") == COMMENT
            (error,) = data(await waits.read())
            assert error["error"]["code"] == "queue_timeout"


async def test_openai_s_client_reads_over_comments_and_raises_the_last_event() -> None:
    async with cluster(**BEATS, retry_max=0) as c, openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="-") as client:
        may_go = asyncio.Event()
        loop = asyncio.get_running_loop()
        for behave, fails in ((answer_ok, False), (always(503, {"error": {"message": "gone"}}), True)):
            may_go.clear()
            c.decodes[0].behave = later(may_go, behave)
            stream = await client.chat.completions.create(model="m", messages=[], stream=True)
            loop.call_soon(may_go.set)  # its headers have come: a comment has left
            if fails:
                with pytest.raises(openai.APIError, match="gone"):
                    [chunk async for chunk in stream]
            else:
                assert len([chunk async for chunk in stream]) == 3


def test_what_keeps_a_stream_open() -> None:
    beats = {path: shape_of(path).beat for path in ("/v1/messages", "/api/chat", "/generate")}
    assert beats == {"/v1/messages": PING, "/api/chat": b"", "/generate": COMMENT}
    assert PING == b'event: ping\ndata: {"type":"ping"}\n\n'
