"""Two tenants with the same prompt: `cache_salt` and `extra_key` keep their prefixes apart, on one worker and on pairs."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate_all, post, session, state_of
from tests.e2e.cluster import Cluster
from tests.e2e.shared.test_kv_events import wait_until_they_agree

Cached = Callable[[Cluster, list[int], dict[str, Any]], Awaitable[int]]


async def native(cluster: Cluster, prompt: list[int], fields: dict[str, Any]) -> int:
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    (answer,) = await generate_all(cluster.router, [{"input_ids": prompt, "sampling_params": sampling, **fields}])
    return int(answer["meta_info"]["cached_tokens"])


async def openai(cluster: Cluster, prompt: list[int], fields: dict[str, Any]) -> int:
    async with session() as http:
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}
        status, answer = await post(http, f"{cluster.router}/v1/completions", body)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("shape", ["unified", "nixl", "mooncake"])
@pytest.mark.parametrize("cached", [native, openai])
async def test_a_tenant_finds_its_own_prefixes_alone(
    request: pytest.FixtureRequest, shape: str, cached: Cached
) -> None:
    cluster: Cluster = request.getfixturevalue(shape)
    prompt = [random.randrange(16, 272) for _ in range(600)]
    tenants: list[dict[str, Any]] = [{"cache_salt": "a"}, {"extra_key": "b"}, {"cache_salt": "a", "extra_key": "b"}, {}]
    assert [await cached(cluster, prompt, tenant) for tenant in tenants] == [0, 0, 0, 0]
    if shape == "mooncake":
        await wait_until_they_agree(cluster)  # then its router sends a prompt where the tenant's prefix is
    assert all([await cached(cluster, prompt, tenant) >= 512 for tenant in tenants])
    await assert_all_back(cluster)


@pytest.mark.parametrize("shape", ["unified", "nixl"])
async def test_a_conversation_is_known_by_its_name(request: pytest.FixtureRequest, shape: str) -> None:
    cluster: Cluster = request.getfixturevalue(shape)
    (computing,) = cluster.of("unified" if shape == "unified" else "prefill")[:1]
    before = (await state_of(computing.url))["counters"]
    prompt, named = [random.randrange(16, 272) for _ in range(600)], {"session_id": f"agent-{random.random()}"}
    assert await native(cluster, prompt, named) == 0
    assert await openai(cluster, prompt + [17] * 40, named) >= 592
    after = (await state_of(computing.url))["counters"]
    assert after["conversation_turns"] == before["conversation_turns"] + 1
    assert after["conversation_hit_tokens"] >= before["conversation_hit_tokens"] + 592
    async with session() as http:
        for path, body in (("/expect_return", {**named, "expected_return_s": 5}), ("/close_session", named)):
            status, answer = await post(http, cluster.router + path, body)
            assert status == 200, answer  # of the router: the worst of its workers'
    await assert_all_back(cluster)
