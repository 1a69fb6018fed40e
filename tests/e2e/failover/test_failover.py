"""A worker is lost under answers, and no client sees it: real processes, NIXL, tokens and text as one worker gives them."""

import asyncio
import json
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from tests.e2e.client import session
from tests.e2e.cluster import Started, several, tandem
from tests.e2e.settings import settings
from tools.family import family

SLOW = ("--stream", "threaded", "--log-level", "warning", "--device", "cpu")
DELAY_S = 0.02
KV = ("--max-total-tokens", "4096", "--page-size", "8", "--num-threads", "1", "--enable-return-hidden-states")
NEW = 130
FAULT_AFTER = 60  # events: an answer that is not streamed has told the router of its first tokens


@dataclass
class Fleet:
    router: str
    answering: list[Started]
    prefill: list[Started]  # of pairs
    faults: "tuple[Fault, ...]"


@pytest.fixture(
    params=["nixl", *(pytest.param(way, marks=pytest.mark.slow) for way in ("unified", "nixl, as unified"))]
)
def fleet(request: pytest.FixtureRequest, qwen3: str, temp: Path) -> Iterator[Fleet]:
    """Workers that answer, one more than faults; with NIXL beside two that compute prompts."""
    faults, unified = FAULTS[request.param], request.param == "unified"
    names = [f"a{i}" for i in range(len(faults) + 1)]
    serve = ("serve", "--port", "0", "--model-path", qwen3, *SLOW, *KV)
    mode = () if unified else ("--disaggregation-mode", "decode")
    commands = {name: (*serve, *mode) for name in names}
    if not unified:
        prefill = (*serve, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0")
        commands |= {"p0": prefill, "p1": prefill}
    with several(temp, commands, settings(stream_delay_s=DELAY_S)) as workers:
        answering, computing = ([workers[name] for name in workers if name[0] == role] for role in "ap")
        if unified:
            flags = ["--worker-urls", *(worker.url for worker in answering)]
        else:
            flags = ["--pd-disaggregation"]
            for flag, some in (("--prefill", computing), ("--decode", answering)):
                flags += [word for worker in some for word in (flag, worker.url)]
        # A drain is seen while the streams still run, also by a router that has lost its heartbeats to a slow machine.
        flags += ["--health-check-interval-secs", "0.2"]
        with tandem(temp / "r", "router", "--port", "0", *flags) as router:
            yield Fleet(router.url, answering, computing, faults)


Bodies = dict[str, tuple[str, dict[str, Any]]]
BODIES: Bodies = {
    "native": (
        "/generate",
        {"text": "a native prompt", "sampling_params": {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}},
    ),
    "seeded": (
        "/generate",
        {
            "text": "another",
            "sampling_params": {
                "max_new_tokens": NEW,
                "temperature": 0.9,
                "seed": 5,
                "frequency_penalty": 0.4,
                "ignore_eos": True,
            },
        },
    ),
    "logprobs": (
        "/generate",
        {
            "text": "each with its logprobs",
            "sampling_params": {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [7, 8],
            "return_hidden_states": True,
        },
    ),
    "completion": (
        "/v1/completions",
        {"model": "default", "prompt": "once", "max_tokens": NEW, "temperature": 0, "logprobs": 2, "ignore_eos": True},
    ),
    "chat": (
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": NEW,
            "temperature": 0.7,
            "seed": 3,
            "n": 2,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
}


async def events_of(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], counts: list[int], at: int
) -> list[Any]:
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


WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    name: (path, {**body, **more})
    for name, more in {
        "seeded": {"return_logprob": True, "top_logprobs_num": 1},
        "completion": {},
        "chat": {"n": 3},
    }.items()
    for path, body in [(BODIES[name][0], {k: v for k, v in BODIES[name][1].items() if k != "stream_options"})]
}


async def answers(url: str) -> list[Any]:
    async with session() as http:
        return await asyncio.gather(*(answer_of(http, url + path, body) for path, body in WHOLE.values()))


async def answer_of(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with http.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return kept(await response.json())


def kept(value: Any) -> Any:
    """An answer without times and names; numbers that are not whole as they round alike."""
    if isinstance(value, dict):
        return {k: kept(v) for k, v in value.items() if k not in VOLATILE and not k.endswith(TIMES)}
    if isinstance(value, list):
        return [kept(v) for v in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


VOLATILE = {"id", "created", "cached_tokens"}
TIMES = ("_time", "_latency", "_throughput")


async def streams(url: str, counts: list[int], bodies: Bodies = BODIES) -> list[list[Any]]:
    async with session() as http:
        return await asyncio.gather(
            *(events_of(http, url + path, body, counts, i) for i, (path, body) in enumerate(bodies.values()))
        )


def shown(events: list[Any]) -> Any:
    """What a client makes of a stream."""
    if "output_ids" in events[0]:
        last = events[-1]
        meta = {k: v for k, v in last["meta_info"].items() if "logprobs" in k or k == "hidden_states"}
        return (
            last["text"],
            last["output_ids"],
            last["meta_info"]["finish_reason"],
            len({e["meta_info"]["id"] for e in events}),
            kept(meta),
        )
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
    signal_all(worker, signal.SIGKILL)


def kill_scheduler(worker: Started) -> None:
    """Its frontend lives, and says that the engine died."""
    worker.child("scheduler").send_signal(signal.SIGKILL)


def freeze(worker: Started) -> None:
    signal_all(worker, signal.SIGSTOP)


def drain(worker: Started) -> None:
    worker.process.send_signal(signal.SIGTERM)


def signal_all(worker: Started, number: int) -> None:
    for process in reversed(family(worker.process.pid)):
        process.send_signal(number)


Fault = Callable[[Started], None]
# By role of the victim: a router sees a worker's end the same way whichever role it has (tests/router/test_failover.py).
FAULTS: dict[str, tuple[Fault, ...]] = {"unified": (kill, drain), "nixl": (kill_scheduler, freeze)}
FAULTS["nixl, as unified"] = FAULTS["unified"]


async def test_answers_go_on_as_if_nothing_had_happened(fleet: Fleet) -> None:
    """Fault after fault, each at a worker that streams: what clients get is what they got before.

    One is OpenAI's own, whose answer has a schema.
    """
    right = [shown(events) for events in await streams(fleet.router, [0] * len(BODIES))]
    written, whole = await filled_in(fleet.router), await answers(fleet.router)
    assert set(json.loads(written)) == {"n", "s"}
    for number, fault in enumerate(fleet.faults):
        counts = [0] * len(BODIES)
        load = asyncio.ensure_future(
            asyncio.gather(streams(fleet.router, counts), filled_in(fleet.router), answers(fleet.router))
        )
        while min(counts) < FAULT_AFTER and not load.done():
            await asyncio.sleep(0.005)
        lost = busy(fleet)
        fault(lost)
        fleet.answering.remove(lost)
        events, text, told = await load
        assert ([shown(one) for one in events], text, told) == (right, written, whole), fault.__name__
        results = await failovers(fleet.router)
        assert results.get("went_on", 0) > number and not results.get("ended"), (fault.__name__, results)
        with suppress(psutil.NoSuchProcess):
            kill(lost)
    if fleet.prefill:  # it dies with prompts in its hands, of answers of which nobody has a token
        lost = fleet.prefill[0]
        lost.child("scheduler").suspend()
        load = asyncio.ensure_future(asyncio.gather(streams(fleet.router, [0] * len(BODIES)), answers(fleet.router)))
        while not load.done() and not await inflight(fleet.router, lost):
            await asyncio.sleep(0.005)
        kill(lost)
        events, told = await load
        assert ([shown(one) for one in events], told) == (right, whole)


async def inflight(router: str, worker: Started) -> int:
    """Requests that a router has at a worker."""
    async with session() as http, http.get(f"{router}/workers") as response:
        known = (await response.json())["workers"]
    return sum(one["inflight_requests"] for one in known if one["url"] == worker.url)


async def filled_in(router: str) -> str:
    """The text of a streamed chat whose answer has a schema."""
    texts = {"s": {"type": "string", "maxLength": 30}, "n": {"enum": [1, 22, 333]}}
    schema = {"type": "object", "properties": texts, "required": [*texts], "additionalProperties": False}
    async with openai.AsyncOpenAI(base_url=router + "/v1", api_key="-", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "fill in"}],
            max_tokens=300,
            temperature=1.0,
            seed=4,
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}},
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def busy(fleet: Fleet) -> Started:
    """The worker whose scheduler computes most answers now."""
    running = {}
    for worker in fleet.answering:
        with urllib.request.urlopen(f"{worker.url}/check", timeout=10) as response:
            running[worker.url] = json.load(response)["running"]
    most = max(fleet.answering, key=lambda worker: running[worker.url])
    assert running[most.url], "no worker runs the stream"
    return most


async def failovers(router: str) -> dict[str, int]:
    """Streams whose worker was lost, by how they ended."""
    async with session() as http, http.get(f"{router}/metrics") as response:
        text = await response.text()
    found: dict[str, int] = {}
    for result, count in re.findall(r'^tandem_router_failovers_total\{.*result="(\w+)"\} ([\d.]+)', text, re.MULTILINE):
        found[result] = found.get(result, 0) + int(float(count))
    return found
