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
from deploy.bench.run import measure, prepare, run
from deploy.bench.stats import RequestRecord, summarize
from deploy.commands.bench import _bench as bench
from deploy.commands.bench import build_parser
from deploy.flags import config_from
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from service.flags import ConfigError

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
        if body.get("model", "scripted") != "scripted":
            return web.json_response({"error": {"message": f"no model {body['model']}."}}, status=404)
        if self.behaviour == "hang":
            await asyncio.sleep(60)
        if self.behaviour == "wait for six":
            while self.most_inside < 6:
                await asyncio.sleep(0.005)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "v1"}], "usage": usage()})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        if request.path == "/generate":
            return await self.generate(reply)
        for number in range(TOKENS):
            await asyncio.sleep(0.005)
            if self.behaviour in ("token ids", "only text"):
                ids = {"token_ids": [number]} if self.behaviour == "token ids" else {}
                await send(reply, {"choices": [{"text": f"k{number} v{number} ", **ids}]})
                continue
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
        if self.behaviour not in ("token ids", "only text"):
            await send(reply, {"choices": [], "usage": usage()})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def generate(self, reply: web.StreamResponse) -> web.StreamResponse:
        """Send the whole text so far in each event, as SGLang does."""
        for number in range(1, TOKENS + 1):
            await asyncio.sleep(0.005)
            reason = {"type": "length"} if number == TOKENS else None
            meta = {"prompt_tokens": 8, "completion_tokens": number, "cached_tokens": 2, "finish_reason": reason}
            await send(reply, {"text": "ab" * number, "meta_info": meta})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "9.8"})


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
    app.router.add_post("/generate", server.complete)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/version", server.version)
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


async def test_a_server_that_is_not_there_is_one_message() -> None:
    with pytest.raises(
        ConfigError, match=r"^--url http://127.0.0.1:1: no answer \(Connection refused\); is the server up"
    ):
        await measure(BenchConfig(url="http://127.0.0.1:1", model="m", num_requests=1))


async def test_a_server_that_ends_during_the_load_is_a_connect_error() -> None:
    async with serving() as server:
        config = config_of(server, num_requests=1)
        prepared = await prepare(config)
    (measured,) = await run(config, prepared)
    assert [record.error for record in measured.records] == ["connect"]


async def test_a_wrong_model_is_one_message_that_names_the_right_ones() -> None:
    async with serving() as server:
        with pytest.raises(ConfigError) as caught:
            await measure(config_of(server, model="other"))
        assert str(caught.value) == (
            "--model other: no model other; the server has scripted: give one of these, or leave --model out"
        )
        assert len(server.bodies) == 1  # asked once, and no load followed


async def test_generate_of_sglang_sends_whole_texts() -> None:
    async with serving() as server:
        records = await records_of(server, api="generate", save_result=True, save_detailed=True, top_p=0.5)
        for record in records:
            assert record.error is None and record.ttft_s is not None and len(record.itl_s) == TOKENS - 1
            assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (8, TOKENS, 2)
            assert (record.prompt_source, record.output_source, record.text) == (
                "meta_info",
                "meta_info",
                "ab" * TOKENS,
            )
        sampling = server.bodies[0]["sampling_params"]
        assert isinstance(server.bodies[0]["text"], str) and sampling["max_new_tokens"] == 32
        assert sampling["top_p"] == 0.5 and sampling["ignore_eos"]


@pytest.mark.parametrize(
    ("behaviour", "flags", "counted"),
    [
        ("good", {}, (8, "usage", TOKENS, "usage")),
        ("token ids", {"prompt": "ids"}, (8, "token ids", TOKENS, "token ids")),
        ("only text", {"tokenizer": DEFAULT_MODEL_PATH}, (9, "tokenizer", 2 * TOKENS, "tokenizer")),
        ("only text", {}, (8, "words", TOKENS, "text events")),
    ],
)
async def test_tokens_are_counted_by_what_there_is(
    behaviour: str, flags: dict[str, Any], counted: tuple[int, str, int, str]
) -> None:
    async with serving() as server:
        server.behaviour = behaviour
        (record,) = await records_of(server, num_requests=1, **flags)
        found = (record.prompt_tokens, record.prompt_source, record.output_tokens, record.output_source)
        assert record.error is None and found == counted


async def test_a_limit_of_requests_in_flight_holds_in_an_open_loop() -> None:
    async with serving() as server:
        records = await records_of(server, request_rate=float("inf"), concurrency=2, num_requests=12)
        assert server.most_inside == 2 and [record.error for record in records] == [None] * 12


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


async def test_a_command_line_of_vllms_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        line = (
            f"--backend openai-chat --base-url {server.url} --endpoint /v1/chat/completions --dataset-name random "
            "--random-input-len 8 --random-output-len 3 --num-prompts 6 --request-rate inf --max-concurrency 3 "
            "--goodput ttft:60000 tpot:60000 e2el:0 --percentile-metrics ttft,e2el --metric-percentiles 25,99.9 "
            f"--save-result --save-detailed --result-dir {tmp_path} --result-filename r.json --metadata tp=2 --disable-tqdm"
        )
        args = build_parser().parse_strict(line.split())
        assert await bench(config_from(args, BenchConfig)) == 0
        assert server.bodies[-1]["messages"][0]["role"] == "user" and server.most_inside <= 3
    text, result = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert f"server       {server.url} (version 9.8), /v1/chat/completions\nmodel        scripted\n" in text
    assert "random words: 6 requests, 8 words in, 3 tokens out on average" in text
    assert "load         all at once, at most 3 at a time; 2 to warm up; streams" in text
    assert "seed         0\nclient " in text and "versions " in text
    assert "tokens       48 prompt (usage), 18 output (usage)" in text
    assert "goodput      0.00 req/s: 0 of 6 requests within ttft 60000 ms, tpot 60000 ms, e2el 0 ms" in text
    assert "| TTFT ms |" in text and "| E2EL ms |" in text and "p99.9" in text and "TPOT ms" not in text
    assert f"written to {tmp_path / 'r.json'}" in text
    wanted = {"backend": "openai-chat", "model_id": "scripted", "num_prompts": 6, "request_rate": "inf", "tp": "2"}
    assert wanted.items() <= result.items() and result["max_concurrency"] == 3
    assert (result["completed"], result["failed"], result["total_input_tokens"]) == (6, 0, 48)
    assert result["request_goodput"] == 0 and result["output_lens"] == [TOKENS] * 6
    assert result["generated_texts"] == ["v" * TOKENS] * 6 and "p25_ttft_ms" in result and "p99_tpot_ms" not in result


async def test_a_command_line_of_sglangs_users(tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    async with serving() as server:
        host, port = server.url.removeprefix("http://").split(":")
        line = (
            f"--backend sglang --host {host} --port {port} --dataset-name random --random-input 8 --random-output 3 "
            f"--num-prompts 4 --max-concurrency 2 --warmup-requests 1 --seed 1 --output-file {output} --disable-tqdm"
        )
        config = config_from(build_parser().parse_strict(line.split()), BenchConfig)
        for _ in range(2):
            assert await bench(config) == 0
    first, second = map(json.loads, output.read_text().splitlines())
    assert first["backend"] == "sglang" and (first["completed"], first["total_output_tokens"]) == (4, 4 * TOKENS)
    assert first["mean_e2e_latency_ms"] >= first["median_ttft_ms"] >= 4 and "p95_itl_ms" in second
    assert second["request_rate"] == "inf" and second["max_concurrency"] == 2 and "errors" not in second
