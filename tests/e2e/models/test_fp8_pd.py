"""KV of 8 bits through two workers, by NIXL and Mooncake, whole and layer by layer, retracted, between other numbers of ranks: the tokens of one, by half the bytes."""

from pathlib import Path
from typing import Any

import pytest

from engine.kernels.linear import linear_kernel
from tests.e2e.ranks.test_rank_pairs import Cell, pair_of
from tests.e2e.two_engines import disaggregated, run, turning, unified
from tests.engine.engine_in_process import prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

ASKED = [(f"r{i}", prompt_of(70 - 9 * i, i), 44) for i in range(4)]
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 128}
FLAGS: dict[str, Any] = {"chunked_prefill_size": 32, "max_total_tokens": 8192}
FP8: dict[str, Any] = {**FLAGS, "kv_cache_dtype": "fp8_e4m3"}
# What runs is retracted, and comes back from the host.
TIGHT = {"max_total_tokens": 304, "schedule_conservativeness": 0.0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("fp8") / "model", "qwen3", dtype="bfloat16", **SHAPE)


@pytest.fixture(scope="module")
def wanted(path: str) -> dict[str, list[int]]:
    with unified(path, **FP8) as system:
        return run(system, ASKED, turns_between=6)


@pytest.mark.parametrize("way", ["nixl", "mooncake"])
def test_two_workers_give_the_tokens_of_one_by_half_the_bytes(
    way: str, path: str, wanted: dict[str, list[int]]
) -> None:
    disagg = {
        "disaggregation_transfer_backend": way,
        "disaggregation_kv_checksum": True,
        "disaggregation_layerwise_transfer": "on" if way == "mooncake" else "off",
        "disaggregation_decode_retraction_backup": "host",
    }
    sent = {}
    for dtype in ("bf16", "fp8_e4m3"):
        flags = {**FLAGS, "kv_cache_dtype": dtype, "disagg": disagg}
        with disaggregated(path, decode=TIGHT if way == "nixl" else {}, **flags) as pair:
            tokens = run(pair, ASKED, together=len(ASKED), turns_between=6)
            prefill, decode = pair.workers
            sent[dtype] = prefill.role.counters()["kv_sent_bytes"]
            assert decode.role.counters()["kv_checksum_verified"] == len(ASKED)
            assert (decode.parts.scheduler.counters.retractions > 0) == (way == "nixl")
    assert tokens == wanted
    assert sent["fp8_e4m3"] * 64 == sent["bf16"] * 33, "33 bytes a row in place of 64"


@pytest.mark.skipif(linear_kernel() is None, reason="products of torch depend on the batch")
def test_units_of_two_ranks_are_those_of_one(path: str) -> None:
    with unified(path, **FP8, reduce_units=2) as system:
        wanted = run(system, ASKED, turns_between=6)
    cell = Cell("nixl", (2, 1), (1, 1), "on", "host")
    flags = {**FP8, "num_threads": 1, "reduce_units": 2, "kv_units": 2}
    with pair_of(cell, path, flags=flags, decode={}) as pair:
        assert pair.conflict is None
        assert run(pair, ASKED, together=len(ASKED), turns_between=6) == wanted


def test_windows_in_a_pool_of_their_own(tmp_path: Path) -> None:
    """Of whose pages the last ones of a prompt cross."""
    some = {"sliding_window": 22, "use_sliding_window": True, "max_window_layers": 2}
    path, flags = make_tiny_checkpoint(tmp_path / "model", "qwen2", **some), {**FP8, "page_size": 4}
    with unified(path, **flags, disable_hybrid_swa_memory=True) as system:
        wanted = run(system, ASKED, turns_between=6)
    with disaggregated(path, decode={}, **flags) as pair:
        assert run(pair, ASKED, turns_between=6) == wanted
        for worker in pair.workers:
            assert worker.parts.device.windows is not None
            assert all(spec.fp8 for spec in worker.parts.device.windows.specs)


def test_latents_cross_with_their_padding(tmp_path: Path) -> None:
    """By torch: the CPU's kernel reads none."""
    path = make_tiny_checkpoint(tmp_path / "model", "deepseek_v3")
    flags = {**FP8, "attention_backend": "torch"}
    with unified(path, **flags) as system:
        wanted = run(system, ASKED, turns_between=6)
    with disaggregated(path, decode={}, disagg={"disaggregation_kv_checksum": True}, **flags) as pair:
        assert run(pair, ASKED, turns_between=6) == wanted
        for worker in pair.workers:
            assert worker.parts.pool.specs[0].row_bytes() == 64, "32 + 16 codes, an exponent, 15 bytes"


def test_workers_of_other_types_are_refused_with_both_and_the_flag(path: str) -> None:
    with disaggregated(path, decode={"kv_cache_dtype": "auto"}, **FP8) as pair:
        pair.submit("r", ASKED[0][1], new=4)
        decode = pair.workers[-1]
        for _ in turning(pair.workers):
            if decode.aborted:
                break
        why = decode.aborted["r"]
        assert pair.conflict is not None and pair.conflict in why, "a router knows before"
        assert "dtype differs" in why and "'bfloat16, KV in fp8_e4m3'" in why and "'bfloat16'" in why
        assert "--kv-cache-dtype" in why
