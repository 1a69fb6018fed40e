"""The bench against a real server that misbehaves on request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from deploy.bench.config import BenchConfig
from deploy.bench.run import measure
from deploy.bench.stats import RequestRecord, summarize
from deploy.commands.bench import _bench as bench

TOKENS = 3


class Server:
    """Answers as the prompt's first word says; keeps every body, and counts who is in at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.inside = 0
        self.most_inside = 0
        self.url = ""
        self.behaviour = "good"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            return await self.answer(request, body)
        finally:
            self.inside -= 1

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.behaviour == "503":
            return web.json_response({"error": {"message": "full"}}, status=503)
        if self.behaviour == "hang":
            await asyncio.sleep(60)
        if self.behaviour == "wait for six":
            while self.most_inside < 6:
                await asyncio.sleep(0.005)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "v1"}], "usage": usage()})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for number in range(TOKENS):
            await asyncio.sleep(0.005)
            chat = request.path.endswith("chat/completions")
            await send(reply, {"choices": [{"delta": {"content": "v"}} if chat else {"text": f"v{number}"}]})
            if self.behaviour == "error event":
                await send(reply, {"error": {"message": "decode died"}})
            if self.behaviour == "cut":
                return reply
            if self.behaviour == "junk":
                await reply.write(b"data: {nonsense\n\n")
        if self.behaviour == "no done":
            await send(reply, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage()})
            return reply
        await send(reply, {"choices": [], "usage": usage()})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})


def usage() -> dict[str, Any]:
    return {"prompt_tokens": 8, "completion_tokens": TOKENS, "prompt_tokens_details": {"cached_tokens": 2}}


async def send(reply: web.StreamResponse, event: dict[str, Any]) -> None:
    await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def config_of(server: Server, **flags: Any) -> BenchConfig:
    small = {"num_requests": 6, "input_len": 8, "warmup": 0, "disable_progress": True}
    return BenchConfig(**({"url": server.url} | small | flags))


async def records_of(server: Server, **flags: Any) -> list[RequestRecord]:
    (measured,) = await measure(config_of(server, **flags))
    assert measured.duration_s > 0
    return measured.records


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_streaming_times_every_token(api: str) -> None:
    async with serving() as server:
        records = await records_of(server, api=api, concurrency=2)
        assert sorted(record.idx for record in records) == list(range(6))
        for record in records:
            assert record.error is None and record.ttft_s is not None and record.ttft_s >= 0.004  # of 5 ms
            assert len(record.itl_s) == TOKENS - 1 and record.e2e_s >= record.ttft_s + sum(record.itl_s)
            assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (8, TOKENS, 2)
        assert server.most_inside == 2
        body = server.bodies[0]
        assert body["model"] == "scripted" and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}


async def test_without_streaming_there_is_no_ttft() -> None:
    async with serving() as server:
        (record,) = await records_of(server, stream=False, num_requests=1)
        assert record.error is None and record.ttft_s is None and record.output_tokens == TOKENS


async def test_a_finish_reason_ends_an_answer_without_done() -> None:
    async with serving() as server:
        server.behaviour = "no done"
        (record,) = await records_of(server, num_requests=1)
        assert record.error is None and record.output_tokens == TOKENS


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ("503", "http 503"),
        ("error event", "stream error"),
        ("cut", "cut short"),
        ("junk", "bad reply"),
        ("hang", "timeout"),
    ],
)
async def test_errors_are_distinguished(behaviour: str, kind: str) -> None:
    async with serving() as server:
        server.behaviour = behaviour
        timeout_s = 0.3 if behaviour == "hang" else 60.0
        records = await records_of(server, num_requests=2, request_timeout_s=timeout_s)
        assert [record.error for record in records] == [kind, kind]
        assert summarize(records, duration_s=1.0).errors == {kind: 2}


async def test_a_server_that_is_not_there_is_a_connect_error() -> None:
    async with serving() as server:
        records = await records_of(server, url="http://127.0.0.1:1", model="m", num_requests=1)
        assert [record.error for record in records] == ["connect"]


async def test_open_loop_does_not_wait_for_answers() -> None:
    async with serving() as server:
        server.behaviour = "wait for six"
        records = await records_of(server, request_rate=200.0, request_timeout_s=60.0)
        assert server.most_inside == 6
        assert [record.error for record in records] == [None] * 6


async def test_compare_takes_turns_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    async with serving() as server, serving() as other:
        other.behaviour = "503"
        turns = {"num_requests": 4, "concurrency": 1, "rounds": 2, "warmup": 1}
        config = config_of(server, compare=other.url, api_key="hush", output=str(output), **turns)
        assert await bench(config) == 1  # not every request was answered
        assert len(server.bodies) == len(other.bodies) == 5
    result = json.loads(output.read_text())
    assert [target["summary"]["completed"] for target in result["targets"]] == [4, 0]
    records = result["targets"][0]["records"]
    assert len(records) == 4
    for before, after in pairwise(records):  # one run, one clock: no turn begins at 0 again
        assert after["sent_s"] >= before["sent_s"] + before["e2e_s"]
    assert result["environment"]["cpu"] and "hush" not in output.read_text()
    assert "http 503: 4" in capsys.readouterr().out
