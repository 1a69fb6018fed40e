"""Bad values of every field through a real cluster: a 4xx that names the field, and the batch they would have joined

goes on untouched: streams that run beside them all the while give the right tokens.
"""

import asyncio
import io
import json
import random
from typing import Any

import aiohttp
import pytest

from engine.models.recall.oracle import continuation
from tests.e2e.client import assert_all_back, generate, session
from tests.e2e.cluster import Cluster
from tests.e2e.workload import recall_prompt

CHAT, COMPLETE, GENERATE, EMBED = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/embeddings"
USER = {"messages": [{"role": "user", "content": "k17 v42 k17"}]}
IDS = {"input_ids": [1, 20, 280, 20]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NAN, INF = "NaN", "Infinity"
STREAM_TOKENS = 400
HUGE = 10**40

SAMPLING: list[tuple[str, Any]] = [
    *(("temperature", v) for v in (-0.5, -1e-9, "hot", [], {}, True, 1e400)),
    *(("top_p", v) for v in (0, -0.1, 1.0001, 1e300, "1")),
    *(("top_k", v) for v in (0, -2, 1.5, "5", HUGE)),
    *(("min_p", v) for v in (-0.1, 1.1)),
    *(("frequency_penalty", v) for v in (2.1, -2.1, "x")),
    *(("presence_penalty", v) for v in (2.1, -1e300)),
    *(("repetition_penalty", v) for v in (0, -1, 2.5)),
    *(("max_new_tokens", v) for v in (-1, -HUGE, 1.5, "5", 10**9, True)),
    *(("min_new_tokens", v) for v in (-1, -HUGE, "x")),
    *(("n", v) for v in (0, -1, 129, 10**12, HUGE, 1.5, True)),
    *(("sampling_seed", v) for v in (2**63, -(2**63) - 1, HUGE, "x", 0.5)),
    ("stop", ""),
    ("stop", "x" * 10_000_000),
    ("stop", ["x" * 1000] * 10_000),
    ("stop", [["x"]]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [528]),
    ("stop_token_ids", [HUGE]),
    ("stop_token_ids", 5),
    ("logit_bias", {"20": 101}),
    ("logit_bias", {"20": 1e300}),
    ("logit_bias", {"528": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"k17": 1}),
    ("logit_bias", [1]),
    ("regex", "("),
    ("regex", "[a-"),
    ("regex", ""),
    ("regex", 5),
    ("ebnf", "start: nowhere"),
    ("ebnf", "root ::= ("),
    ("json_schema", "{"),
    ("json_schema", '{"type": "nothing"}'),
    ("json_schema", '{"$ref": "#/nowhere"}'),
    ("json_schema", "[" * 5000),
    ("structural_tag", "{}"),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 1),
    ("stream_interval", 0),
    ("stream_interval", -5),
]
NATIVE: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": ""}, "text"),
    ({"text": ["k17", ""]}, "text"),
    ({"text": 5}, "text"),
    ({"text": "k17", "input_ids": [1]}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [528]}, "input_ids"),
    ({"input_ids": [HUGE]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [[1], 2]}, "input_ids"),
    ({**IDS, "sampling_params": []}, "sampling_params"),
    ({"input_ids": [[1], [1]], "sampling_params": [{}]}, "sampling_params"),
    ({"input_ids": [[1], [1]], "sampling_params": [{}, {}, {}]}, "sampling_params"),
    ({"input_ids": [[1], [1]], "sampling_params": [{"temperature": 1}, {"temperature": -1}]}, "temperature"),
    ({"input_ids": [[1], [1]], "rid": ["a"]}, "rid"),
    ({"input_ids": [[1], [1]], "rid": ["a", "a"]}, "rid"),
    ({**IDS, "rid": "x" * 10_000}, "rid"),
    ({**IDS, "rid": {"$ne": 1}}, "rid"),
    ({**IDS, "priority": 2**31}, "priority"),
    ({**IDS, "priority": -HUGE}, "priority"),
    ({**IDS, "priority": "high"}, "priority"),
    ({**IDS, "priority": 0.5}, "priority"),
    ({**IDS, "return_logprob": True, "logprob_start_len": 5}, "logprob_start_len"),
    ({**IDS, "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({**IDS, "return_logprob": True, "logprob_start_len": HUGE}, "logprob_start_len"),
    ({"input_ids": [[1], [1]], "return_logprob": True, "logprob_start_len": [0]}, "logprob_start_len"),
    ({"input_ids": [[1], [1]], "return_logprob": [True]}, "return_logprob"),
    ({**IDS, "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({**IDS, "return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
    ({**IDS, "return_logprob": True, "token_ids_logprob": [528]}, "token_ids_logprob"),
    ({**IDS, "return_logprob": True, "token_ids_logprob": [1] * 1000}, "token_ids_logprob"),
    ({**IDS, "return_hidden_states": True}, "return_hidden_states"),
    ({**IDS, "stream": "yes"}, "stream"),
    ({"input_ids": [20] * 40_000}, "max_new_tokens"),
]
OPENAI: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {**USER, "max_tokens": -1}, "max_tokens"),
    (CHAT, {**USER, "max_tokens": 10**9}, "messages"),  # as OpenAI has it: code context_length_exceeded
    (CHAT, {**USER, "max_completion_tokens": HUGE}, "messages"),
    (CHAT, {**USER, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {**USER, "response_format": "json"}, "response_format"),
    (
        CHAT,
        {**USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
        "response_format",
    ),
    (CHAT, {**USER, "response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
    (CHAT, {**USER, "tools": {}, "tool_choice": "auto"}, "tools"),
    (CHAT, {**USER, "tools": [5]}, "tools"),
    (CHAT, {**USER, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {**USER, "tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools"),
    (CHAT, {**USER, "tools": [TOOL], "tool_choice": 5}, "tool_choice"),
    (CHAT, {**USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (CHAT, {**USER, "logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
    (CHAT, {**USER, "top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "tool"}]}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (COMPLETE, {"prompt": []}, "prompt"),
    (COMPLETE, {"prompt": [[1], []]}, "prompt"),
    (COMPLETE, {"prompt": [528]}, "prompt"),
    (COMPLETE, {"prompt": "k17", "logprobs": 10**9}, "logprobs"),
    (COMPLETE, {"prompt": "k17", "max_tokens": -5}, "max_tokens"),
    (COMPLETE, {"prompt": "k17", "echo": 5}, "echo"),
]
RAW: list[tuple[str, bytes, str]] = [
    *(
        (GENERATE, b'{"text": "k17", "sampling_params": {"temperature": %s}}' % v, "")
        for v in (b"NaN", b"Infinity", b"-Infinity")
    ),
    (GENERATE, b'{"text": "k17", "sampling_params": {"top_p": NaN}}', ""),
    (GENERATE, b'{"text": "\xff\xfe"}', ""),
    (GENERATE, b'{"text": "\\ud800"}', ""),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\udfff"}]}', ""),
    (COMPLETE, b'{"prompt": "k17", "stop": "\\ud800"}', ""),
    (COMPLETE, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    (CHAT, b'{"messages": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", ""),
    (
        GENERATE,
        b'{"text": "k17", "sampling_params": {"json_schema": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}}",
        "",
    ),
]


def cases() -> list[tuple[str, bytes, str]]:
    """(path, body, the field that the error names; "" where the body is no JSON that could name one)."""
    native = [({**IDS, "sampling_params": {field: value}}, field) for field, value in SAMPLING]
    bodies = [(GENERATE, body, field) for body, field in [*native, *NATIVE]] + OPENAI
    return [(path, json.dumps(body).replace(INF, "1e400").encode(), field) for path, body, field in bodies] + RAW


async def _stream_until(c: Cluster, http: aiohttp.ClientSession, over: asyncio.Event, *, seed: int) -> int:
    """One right stream after the other; how many."""
    count = 0
    while not over.is_set() or count == 0:
        prompt = recall_prompt(random.Random(seed + count), 60)
        sampling = {"temperature": 0, "max_new_tokens": STREAM_TOKENS, "ignore_eos": True}
        answer = await generate(http, c.router, {"input_ids": prompt, "sampling_params": sampling, "stream": True})
        assert answer["output_ids"] == continuation(prompt, STREAM_TOKENS, ignore_eos=True)
        count += 1
    return count


async def _refusals(c: Cluster, http: aiohttp.ClientSession) -> list[str]:
    """What is wrong about the answers to bad values."""
    wrong = []
    for path, body, field in cases():
        async with http.post(
            c.router + path, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        ) as response:
            said = await response.text()
            error = json.loads(said).get("error", {}) if said.startswith("{") else {}
            named = field in (error.get("param") or "") and field in error.get("message", "")
            if response.status != 400 or not error.get("message") or not named:
                wrong.append(f"{path} {body[:120]!r} ({field}): {response.status} {said[:200]}")
    return wrong


def test_each_is_named_and_touches_nobody(nixl: Cluster) -> None:
    async def ask() -> tuple[list[str], list[int]]:
        over = asyncio.Event()
        async with session() as http:
            streams = [asyncio.create_task(_stream_until(nixl, http, over, seed=100 * i)) for i in range(2)]
            wrong = await _refusals(nixl, http)
            over.set()
            counts = await asyncio.gather(*streams)
        await assert_all_back(nixl)
        return wrong, counts

    wrong, counts = asyncio.run(ask())
    assert not wrong, "\n".join(wrong)
    assert all(count >= 1 for count in counts)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"regex": "("}])
def test_one_bad_sample_refuses_its_whole_batch_and_no_other(nixl: Cluster, bad: dict[str, Any]) -> None:
    """Nothing of a batch runs when one of it is refused; what was sent before it is answered."""

    async def ask() -> None:
        async with session() as http:
            over = asyncio.Event()
            beside = asyncio.create_task(_stream_until(nixl, http, over, seed=7))
            prompt = recall_prompt(random.Random(1), 5)
            body = {"input_ids": [prompt] * 3, "sampling_params": [{"max_new_tokens": 5}, bad, {"max_new_tokens": 5}]}
            async with http.post(f"{nixl.router}/generate", json=body) as response:
                assert response.status == 400 and next(iter(bad)) in (await response.json())["error"]["param"]
            over.set()
            await beside
        await assert_all_back(nixl)

    asyncio.run(ask())
