"""A worker is killed under streams, and no client sees it: real processes, NIXL, tokens and text as one worker gives them."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.client import session
from tests.e2e.cluster import Started, tandem

SLOW = ("--stream", "threaded", "--stream-delay", "0.02", "--log-level", "warning", "--device", "cpu")
KV = ("--max-total-tokens", "4096", "--page-size", "8", "--num-threads", "1")
NEW = 60
KILL_AFTER = 12  # events


@dataclass
class Fleet:
    router: str
    answering: list[Started]  # those that stream


@pytest.fixture(params=["unified", "nixl"])
def fleet(request: pytest.FixtureRequest, qwen3: str, temp: Path) -> Iterator[Fleet]:
    """Two workers that answer; with NIXL beside one that computes prompts."""
    with ExitStack() as stack:

        def serve(name: str, *flags: str) -> Started:
            return stack.enter_context(
                tandem(temp / name, "serve", "--port", "0", "--model-path", qwen3, *SLOW, *KV, *flags)
            )

        if request.param == "unified":
            answering = [serve(f"u{i}") for i in range(2)]
            flags = ["--worker-urls", *(worker.url for worker in answering)]
        else:
            mode = "--disaggregation-mode"
            prefill = serve("p", mode, "prefill", "--disaggregation-bootstrap-port", "0")
            answering = [serve(f"d{i}", mode, "decode") for i in range(2)]
            flags = ["--pd-disaggregation", "--prefill", prefill.url]
            for worker in answering:
                flags += ["--decode", worker.url]
        router = stack.enter_context(tandem(temp / "r", "router", "--port", "0", *flags))
        yield Fleet(router.url, answering)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/generate", {"text": "a native prompt", "sampling_params": {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}}),
    "seeded": ("/generate", {"text": "another", "sampling_params": {"max_new_tokens": NEW, "temperature": 0.9, "seed": 5, "frequency_penalty": 0.4, "ignore_eos": True}}),
    "completion": ("/v1/completions", {"model": "default", "prompt": "once", "max_tokens": NEW, "temperature": 0, "logprobs": 2, "ignore_eos": True}),
    "chat": ("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": NEW, "temperature": 0.7, "seed": 3, "n": 2, "ignore_eos": True, "stream_options": {"include_usage": True}}),
}


async def events_of(http: aiohttp.ClientSession, url: str, body: dict[str, Any], counts: list[int], at: int) -> list[Any]:
    """All events of a stream; `counts[at]`: how many have come."""
    found = []
    async with http.post(url, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                found.append(line[6:].strip())
                counts[at] += 1
            else:
                assert line.strip() == b"", line
    assert found[-1] == b"[DONE]", found[-1]
    return [json.loads(one) for one in found[:-1]]


async def streams(url: str, counts: list[int]) -> list[list[Any]]:
    async with session() as http:
        return await asyncio.gather(
            *(events_of(http, url + path, body, counts, i) for i, (path, body) in enumerate(BODIES.values()))
        )


def shown(name: str, events: list[Any]) -> Any:
    """What a client makes of a stream."""
    if "output_ids" in events[0]:
        last = events[-1]
        return last["text"], last["output_ids"], last["meta_info"]["finish_reason"], len({e["meta_info"]["id"] for e in events})
    assert len({e["id"] for e in events}) == len({e["created"] for e in events}) == 1
    texts: dict[int, str] = {}
    columns: list[Any] = []
    ends, roles = {}, 0
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            roles += "role" in delta
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice.get("text") or delta.get("content") or "")
            if choice.get("logprobs"):
                columns += zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    usage = events[-1].get("usage") or {}
    return texts, ends, roles, columns, usage.get("completion_tokens"), usage.get("prompt_tokens")


def kill(worker: Started) -> None:
    """The whole worker, as a machine that fails."""
    leader = psutil.Process(worker.process.pid)
    for process in (leader, *leader.children(recursive=True)):
        process.send_signal(signal.SIGKILL)


async def test_a_worker_is_killed_and_its_streams_go_on(fleet: Fleet) -> None:
    right = [shown(name, events) for name, events in zip(BODIES, await streams(fleet.router, [0] * len(BODIES)), strict=True)]
    counts = [0] * len(BODIES)
    load = asyncio.ensure_future(streams(fleet.router, counts))
    while min(counts) < KILL_AFTER and not load.done():
        await asyncio.sleep(0.005)
    kill(fleet.answering[0])
    found = [shown(name, events) for name, events in zip(BODIES, await load, strict=True)]
    assert found == right
    async with session() as http, http.get(f"{fleet.router}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("tandem_router_failovers_total")]
    assert any('result="went_on"' in line for line in lines), lines
    assert not any('result="ended"' in line for line in lines), lines
