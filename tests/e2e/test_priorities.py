"""Decode keeps the order of priorities: real processes, tokens as one engine gives them. (By literals: tests/disagg.)"""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, generate, post, session, state_of, wait_for_state
from tests.e2e.cluster import Cluster, cluster
from tests.e2e.settings import settings
from tests.engine.engine_in_process import prompt_of, tokens_of

pytestmark = pytest.mark.slow
FLAGS = (
    *("--chunked-prefill-size", "64", "--log-level", "warning", "--stream", "threaded"),
    *("--max-total-tokens", "640", "--num-reserved-decode-tokens", "0", "--schedule-conservativeness", "0"),
    *("--disaggregation-decode-retraction-backup", "host", "--enable-priority-scheduling"),
)


@pytest.fixture(scope="module")
def pd(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Memory for few answers at a time, and no reserve: decode retracts. Priorities count."""
    env = settings(stream_delay_s=0.001)
    with cluster(tmp_path_factory.mktemp("pd"), "--model-path", qwen3, *FLAGS, env=env) as c:
        yield c


async def test_decode_keeps_the_order_of_priorities(pd: Cluster, qwen3: str) -> None:
    """Memory for one of them at a time. "low" runs when the others arrive, in the order of a dict."""
    wanted = {"low": (0, 30, 500), "poor": (0, 200, 150), "mean": (5, 200, 150), "high": (50, 200, 150)}
    bodies = {
        name: {
            "input_ids": prompt_of(length, length + priority + new),
            "priority": priority,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        }
        for name, (priority, length, new) in wanted.items()
    }
    before = await decode_counters(pd)
    ended, answers = await while_decode_pauses(pd, bodies)
    assert ended == ["high", "mean", "low", "poor"]
    assert (await decode_counters(pd))["preemptions"] - before["preemptions"] == 1
    assert {name: answers[name]["meta_info"]["num_preemptions"] for name in bodies} == {
        name: name == "low" for name in bodies
    }
    assert [answers[name]["output_ids"] for name in bodies] == tokens_of(qwen3, list(bodies.values()))
    await assert_all_back(pd)


async def while_decode_pauses(c: Cluster, bodies: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """The first body runs when decode is paused; the others arrive one by one, then all go on. In which order they ended."""
    decode, ended, answers = c.of("decode")[0].url, list[str](), dict[str, Any]()

    async def ask(http: aiohttp.ClientSession, name: str) -> None:
        answers[name] = await generate(http, c.router, bodies[name])
        ended.append(name)

    async with session() as http, asyncio.TaskGroup() as tasks:
        first, *others = bodies
        tasks.create_task(ask(http, first))
        await wait_for_state(decode, lambda state: state["running"] == 1)
        assert (await post(http, f"{decode}/pause_generation", {"mode": "in_place"}))[0] == 200
        for count, name in enumerate(others, start=1):
            tasks.create_task(ask(http, name))
            await wait_for_state(decode, lambda state, count=count: state["queues"]["held"] == count)
        assert (await post(http, f"{decode}/continue_generation", {}))[0] == 200
    return ended, answers


async def decode_counters(c: Cluster) -> dict[str, float]:
    return (await state_of(c.of("decode")[0].url))["counters"]  # type: ignore[no-any-return]
