"""A prefix is copied from one prefill worker to the other over Mooncake, as a router asks for it, and for no stranger."""

import json
import random
from typing import Any

from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header
from tests.e2e.client import assert_all_back, generate_all, session, state_of, text_of
from tests.e2e.cluster import Cluster, Worker
from tests.e2e.shared.conftest import SECRET

ROOMS = random.Random(5)


async def copied(to: Worker, prompt: list[int], header: str) -> tuple[int, dict[str, Any]]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_room": ROOMS.getrandbits(60) + 1,
    }
    async with session() as http:
        answer = await http.post(f"{to.url}/generate", json=body, headers={PREFIX_HEADER: header})
        return answer.status, await answer.json()


async def test_a_copy_is_there_for_later_requests(mooncake: Cluster) -> None:
    prompt = [random.Random(77).randrange(16, 272) for _ in range(900)]
    asked = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
    earlier = {worker: await state_of(worker.url) for worker in mooncake.of("prefill")}
    (first,) = await generate_all(mooncake.router, [asked])
    states = {worker: await state_of(worker.url) for worker in mooncake.of("prefill")}
    has_it = max(states, key=lambda worker: states[worker]["pages"]["cached"] - earlier[worker]["pages"]["cached"])
    (other,) = set(states) - {has_it}
    at = json.loads(json.loads(await text_of(f"{has_it.url}/server_info"))["prefix_source"])
    source = PrefixSourceHeader(control=at["control"], incarnation=at["incarnation"], num_tokens=600, copy=True)
    before = states[other]["counters"]
    status, answer = await copied(other, prompt, write_header(source, SECRET.encode()))
    assert status == 200 and 500 < answer["meta_info"]["cached_tokens"] <= 600, answer
    after = (await state_of(other.url))["counters"]
    assert after["prefix_fetched_tokens"] == answer["meta_info"]["cached_tokens"]
    assert after["prefill_steps"] == before["prefill_steps"], "it computed something"
    status, answer = await copied(other, prompt, write_header(source, SECRET.encode()))
    assert status == 409 and "is here already" in answer["error"]["message"]
    (again,) = await generate_all(mooncake.router, [asked])
    assert again["output_ids"] == first["output_ids"]
    await assert_all_back(mooncake)
