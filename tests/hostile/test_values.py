"""Wrong values through a router and both workers: a 4xx that names the field, while streams beside them stay right."""

import asyncio
import io
import json
import random
from typing import Any

import aiohttp
import pytest

from engine.models.recall.oracle import continuation
from tests.e2e.client import assert_all_back, generate, session
from tests.e2e.workload import recall_prompt
from tests.hostile.doors import Doors
from tests.hostile.wrong_fields import cases

STREAM_TOKENS = 400


async def _stream_until(url: str, http: aiohttp.ClientSession, over: asyncio.Event, *, seed: int) -> int:
    """One right stream after the other; how many."""
    count = 0
    while not over.is_set() or count == 0:
        prompt = recall_prompt(random.Random(seed + count), 60)
        sampling = {"temperature": 0, "max_new_tokens": STREAM_TOKENS, "ignore_eos": True}
        answer = await generate(http, url, {"input_ids": prompt, "sampling_params": sampling, "stream": True})
        assert answer["output_ids"] == continuation(prompt, STREAM_TOKENS, ignore_eos=True)
        count += 1
    return count


async def _refusals(url: str, http: aiohttp.ClientSession) -> list[str]:
    """What is wrong about the answers to bad values."""
    wrong = []
    for path, body, field in cases():
        async with http.post(
            url + path, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        ) as response:
            said = await response.text()
            error = json.loads(said).get("error", {}) if said.startswith("{") else {}
            named = field in (error.get("param") or "") and field in error.get("message", "")
            if response.status != 400 or not error.get("message") or not named:
                wrong.append(f"{path} {body[:120]!r} ({field}): {response.status} {said[:200]}")
    return wrong


def test_each_is_named_and_touches_nobody(doors: Doors) -> None:
    async def ask() -> tuple[list[str], list[int]]:
        over = asyncio.Event()
        async with session() as http:
            streams = [
                asyncio.create_task(_stream_until(doors.urls["router"], http, over, seed=100 * i)) for i in range(2)
            ]
            wrong = await _refusals(doors.urls["router"], http)
            over.set()
            counts = await asyncio.gather(*streams)
        await assert_all_back(doors.cluster)
        return wrong, counts

    wrong, counts = asyncio.run(ask())
    assert not wrong, "\n".join(wrong)
    assert all(count >= 1 for count in counts)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"regex": "("}])
def test_one_bad_sample_refuses_its_whole_batch_and_no_other(doors: Doors, bad: dict[str, Any]) -> None:
    """Nothing of a batch runs when one of it is refused; what was sent before it is answered."""

    async def ask() -> None:
        async with session() as http:
            over = asyncio.Event()
            beside = asyncio.create_task(_stream_until(doors.urls["router"], http, over, seed=7))
            prompt = recall_prompt(random.Random(1), 5)
            body = {"input_ids": [prompt] * 3, "sampling_params": [{"max_new_tokens": 5}, bad, {"max_new_tokens": 5}]}
            async with http.post(f"{doors.urls['router']}/generate", json=body) as response:
                assert response.status == 400 and next(iter(bad)) in (await response.json())["error"]["param"]
            over.set()
            await beside
        await assert_all_back(doors.cluster)

    asyncio.run(ask())


def test_without_the_flag_adapters_are_refused(doors: Doors) -> None:
    asked = {"input_ids": [1, 20], "sampling_params": {"max_new_tokens": 1}, "lora_path": "one"}
    for url, body in (
        (f"{doors.urls['router']}/generate", asked),
        (f"{doors.urls['prefill']}/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
    ):
        answer = doors.http.post(url, json=body)
        assert answer.status_code == 400 and "--enable-lora" in answer.json()["error"]["message"]
