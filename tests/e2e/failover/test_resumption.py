"""Decode retracts, and prefill workers compute the KV again: real processes, NIXL, tokens as one engine gives them."""

import asyncio
import dataclasses
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate_all, post, session, state_of, wait_for_state
from tests.e2e.cluster import DEAD, POLL_S, Cluster, child_of, cluster
from tests.e2e.settings import settings
from tests.engine.engine_in_process import tokens_of

FLAGS = ("--chunked-prefill-size", "64", "--log-level", "warning", "--stream", "threaded")
SMALL = ("--max-total-tokens", "640", "--num-reserved-decode-tokens", "0", "--schedule-conservativeness", "0")
WAY = ("--disaggregation-decode-retraction-backup", "prefill", "--transfer-backend", "nixl", "--prefill", "2")
BOUNDED_S = 60.0
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 12, "presence_penalty": 0.3, "top_k": 30},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def pd(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill workers, and a decode worker with memory for few answers at a time and no reserve."""
    args, env = ("--model-path", qwen3, *FLAGS, *SMALL, *WAY, DEAD), settings(stream_delay_s=0.003)
    with cluster(tmp_path_factory.mktemp("pd"), *args, env=env) as c:
        yield c


def bodies(count: int, new: int) -> list[dict[str, Any]]:
    rng = random.Random(count)
    return [
        {
            "input_ids": [rng.randrange(16, 272) for _ in range(30 + i)],
            "sampling_params": {"max_new_tokens": new, "ignore_eos": True, **DRAWS[i % len(DRAWS)]},
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def reference(qwen3: str) -> list[list[int]]:
    """Of one engine, for `bodies(8, new=160)`."""
    return tokens_of(qwen3, bodies(8, new=160))


async def test_prefill_computes_it_again_with_the_same_tokens(pd: Cluster, reference: list[list[int]]) -> None:
    answers = await generate_all(pd.router, bodies(8, new=160))
    assert [a["output_ids"] for a in answers] == reference
    await assert_all_back(pd)
    decode = (await state_of(pd.of("decode")[0].url))["counters"]
    prefills = [(await state_of(worker.url))["counters"] for worker in pd.of("prefill")]
    through = decode["resumed_through_prefill"]
    assert through > 0 and through == sum(c.get("recomputed", 0) for c in prefills)
    assert through + decode["resumed_computed"] == decode["retractions"]
    assert sum(a["meta_info"]["num_retractions"] for a in answers) == decode["retractions"]
    assert not decode.get("recompute_failed")


async def test_whole_requests_that_decode_retracts_stay_there(pd: Cluster, reference: list[list[int]]) -> None:
    """They have no room at a prefill worker; halves of pairs beside them have."""
    asked = bodies(8, new=160)
    (worker,) = pd.of("decode")
    before = (await state_of(worker.url))["counters"]
    whole, paired = await asyncio.gather(generate_all(worker.url, asked[::2]), generate_all(pd.router, asked[1::2]))
    answers = [answer for pair in zip(whole, paired, strict=True) for answer in pair]
    assert [a["output_ids"] for a in answers] == reference
    await assert_all_back(pd)
    now = (await state_of(worker.url))["counters"]
    assert sum(a["meta_info"]["num_retractions"] for a in whole) > 0 and not now.get("recompute_failed")
    gone = {name: now[name] - before[name] for name in ("retractions", "resumed_computed", "resumed_through_prefill")}
    assert gone["retractions"] == gone["resumed_computed"] + gone["resumed_through_prefill"]


@pytest.mark.slow
async def test_prefill_dies_while_it_is_asked_and_decode_helps_itself(pd: Cluster, qwen3: str) -> None:
    """Both prefill workers stop, so that recomputation stays pending, and are killed then, if decode has not noticed yet."""
    asked = bodies(4, new=300)
    decode = dataclasses.replace(pd, workers=tuple(pd.of("decode")))
    url = decode.workers[0].url
    schedulers = [child_of(worker.pid, "scheduler") for worker in pd.of("prefill")]

    def on_their_way(now: dict[str, Any]) -> int:
        return int(now["queues"]["prealloc"] + now["queues"]["transfer"])

    def arrived(now: dict[str, Any]) -> bool:
        return on_their_way(now) + now["running"] == len(asked)

    # Decode rests while prompts arrive: none is retracted before the prefill workers stop, however slow they are.
    load = asyncio.ensure_future(generate_all(pd.router, asked))
    async with session() as http:
        await wait_for_state(url, arrived, every_s=POLL_S / 5)
        assert (await post(http, f"{url}/pause_generation", {"mode": "in_place"}))[0] == 200
        await wait_for_state(url, lambda now: not on_their_way(now))
        for process in schedulers:
            process.send_signal(signal.SIGSTOP)
        assert (await post(http, f"{url}/continue_generation", {}))[0] == 200
    await wait_for_state(url, lambda now: now["queues"]["resuming"] or now["counters"].get("recompute_failed"))
    for process in schedulers:
        process.kill()
    answers = await asyncio.wait_for(load, BOUNDED_S)
    assert [a["output_ids"] for a in answers] == tokens_of(qwen3, asked)
    await assert_all_back(decode)
    assert (await state_of(url))["counters"]["recompute_failed"] > 0
