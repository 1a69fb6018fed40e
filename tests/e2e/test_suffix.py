"""Of the second turn of a conversation only what decode has not cached is sent: bytes over NIXL, with and without its cache."""

import random
from pathlib import Path

import pytest

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.e2e.client import assert_all_back, generate, session, state_of
from tests.e2e.cluster import SHIPPED, cluster
from tests.e2e.two_engines import disaggregated, run
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation

NEW = 40


@pytest.mark.parametrize("layers", ["off", "on"])
def test_only_the_missing_suffix_is_sent(layers: str) -> None:
    first = recall_prompt(random.Random(1), 100)
    second = [*first, *continuation(first, NEW + 20, ignore_eos=True)]  # the answer, and what the user says then
    flags = {"disaggregation_layerwise_transfer": layers, "disaggregation_kv_checksum": True}
    sent = {}
    for cached in (False, True):
        own = {"disable_radix_cache": not cached}
        with disaggregated(DEFAULT_MODEL_PATH, decode=own, max_total_tokens=8192, disagg=flags) as pair:
            for rid, prompt in (("first", first), ("second", second)):
                right = continuation(prompt, NEW, ignore_eos=True)
                assert run(pair, [(rid, prompt, NEW)], turns_between=1)[rid] == right
            counters, pool = pair.workers[0].role.counters(), pair.workers[0].parts.pool
            sent[cached] = [round(counters[f"kv_{what}_bytes"] / pool.page_bytes) for what in ("sent", "skipped")]
    pages = [-(-len(prompt) // pool.page_size) for prompt in (first, second)]
    kept = (len(first) + NEW - 1) // pool.page_size  # the last sampled token has no KV
    assert sent == {False: [sum(pages), 0], True: [sum(pages) - kept, kept]}


async def test_the_router_finds_the_decode_worker_that_has_the_conversation(tmp_path: Path) -> None:
    """Two conversations on two decode workers; their second turns come in the other order, in which least_load swaps them."""
    first = [recall_prompt(random.Random(seed), 100) for seed in (1, 2)]
    second = [[*prompt, *continuation(prompt, NEW, ignore_eos=True)] for prompt in first]
    with cluster(tmp_path, "--decode=2", "--decode-policy", "cache_aware", *SHIPPED) as pd:
        async with session() as http:
            for prompt in (*first, *reversed(second)):
                sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
                answer = await generate(http, pd.router, {"input_ids": prompt, "sampling_params": sampling})
                assert answer["output_ids"] == continuation(prompt, NEW, ignore_eos=True)
            (prefill,) = pd.of("prefill")
            assert (await state_of(prefill.url))["counters"]["kv_skipped_bytes"] > 0
        await assert_all_back(pd)
