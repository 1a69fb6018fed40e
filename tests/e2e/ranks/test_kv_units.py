"""Pages of several units give the answers of one: in one worker, and between two over NIXL and Mooncake."""

import random
from contextlib import AbstractContextManager

import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.two_engines import System, disaggregated, run, unified
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation

UNITS = 4  # a KV head each
TIGHT = 464  # tokens: what runs is retracted, and comes back from the host


@pytest.mark.parametrize("way", ["unified", "nixl", "mooncake"])
def test_units_change_no_token(way: str) -> None:
    rng = random.Random(4)
    asked = [(f"r{i}", recall_prompt(rng, 40), 44 - 4 * i) for i in range(4)]
    with _system(way) as system:
        found = run(system, asked, together=len(asked), turns_between=6)
        first, last = system.workers[0].parts, system.workers[-1].parts
        assert first.pool.units == last.pool.units == UNITS
        assert (last.scheduler.counters.retractions > 0) == (way != "mooncake")
        if way != "unified":
            counters = system.workers[-1].role.counters()
            assert counters["kv_checksum_verified"] == len(asked)
    assert found == {rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in asked}


def _system(way: str) -> AbstractContextManager[System]:
    """Whole pages by NIXL, whose tight decode worker keeps retracted KV in host memory; layer by layer by Mooncake."""
    flags: dict[str, object] = {"kv_units": UNITS, "chunked_prefill_size": 32, "schedule_conservativeness": 0.0}
    if way == "unified":
        host = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
        return unified(WIDE_MODEL_PATH, **flags, **host, max_total_tokens=TIGHT)
    disagg = {
        "disaggregation_transfer_backend": way,
        "disaggregation_kv_checksum": True,
        "disaggregation_layerwise_transfer": "on" if way == "mooncake" else "off",
        "disaggregation_decode_retraction_backup": "host",
    }
    decode: dict[str, object] = {"max_total_tokens": TIGHT} if way == "nixl" else {}
    return disaggregated(WIDE_MODEL_PATH, decode=decode, **{"max_total_tokens": 8192, **flags, "disagg": disagg})
