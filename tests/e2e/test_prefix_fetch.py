"""A prefix that one prefill worker has is not computed by another one: real processes, bytes over NIXL (over Mooncake: shared/test_prefixes.py)."""

import asyncio
import random
from pathlib import Path
from typing import Any

from tests.e2e.client import assert_all_back, generate, session, state_of
from tests.e2e.cluster import SHIPPED, Cluster, cluster
from tests.e2e.workload import BOS, pairs
from tools.recall.oracle import continuation

NEW = 12
TAIL = 40
MOST_ROUNDS = 6  # of other prompts: a machine that is busy may get none in time
EVENTS = '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'


def prompts(seed: int) -> tuple[list[int], list[list[int]]]:
    """A beginning, and two prompts that go on behind it."""
    facts = pairs(random.Random(seed), 200)[1:]
    beginning = [BOS, *facts * 4]
    return beginning, [[*beginning, *facts[:num_more]] for num_more in (TAIL // 2, TAIL)]


async def ask(pd: Cluster, prompt: list[int]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    async with session() as http:
        answer = await generate(http, pd.router, {"input_ids": prompt, "sampling_params": sampling})
    assert answer["output_ids"] == continuation(prompt, NEW, ignore_eos=True)


async def counters(pd: Cluster) -> list[dict[str, Any]]:
    return [(await state_of(worker.url))["counters"] for worker in pd.of("prefill")]


async def test_the_other_worker_gets_the_prefix(tmp_path: Path) -> None:
    """Of two requests at once the second goes where less is to be done, to a worker that has computed nothing of them."""
    secret = tmp_path / "secret"
    secret.write_text("only this cluster knows it")
    secret.chmod(0o600)
    by_load = ("--balance-abs-threshold", "0", "--balance-rel-threshold", "1")
    flags = (
        *("--prefill", "2", "--transfer-backend", "nixl", "--prefill-policy", "cache_aware", *by_load),
        *("--prefix-fetch", "--kv-events-config", EVENTS, "--disaggregation-kv-checksum"),
        *("--cluster-secret-file", str(secret), *SHIPPED),
    )
    with cluster(tmp_path, *flags) as pd:
        for seed in range(MOST_ROUNDS):
            beginning, both = prompts(seed)
            await ask(pd, beginning)
            before = await counters(pd)
            await asyncio.gather(*(ask(pd, prompt) for prompt in both))
            after = await counters(pd)
            got = [
                b.get("prefix_fetched_tokens", 0) - a.get("prefix_fetched_tokens", 0)
                for a, b in zip(before, after, strict=True)
            ]
            if any(got):
                break
        assert any(got), [{k: v for k, v in c.items() if "prefix" in k} for c in after]
        assert sum(got) > len(beginning) - 64
        at = got.index(max(got))
        asked = [{name: c[at][name] for name in ("prompt_tokens", "cached_tokens")} for c in (before, after)]
        new = {name: asked[1][name] - asked[0][name] for name in asked[0]}
        assert new["prompt_tokens"] in map(len, both), "each got one of the two"
        assert new["prompt_tokens"] - new["cached_tokens"] < TAIL + 64, "the prefix was computed"
        assert after[1 - at]["prefixes_sent"] >= 1
        await assert_all_back(pd)
