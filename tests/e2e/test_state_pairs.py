"""Recurrent states cross between workers of different shapes: the tokens of one rank, to the bit, and after retraction too."""

from pathlib import Path
from typing import Any

import pytest

from engine.kernels.linear import linear_kernel
from tests.e2e.test_rank_pairs import Cell, pair_of
from tests.e2e.two_engines import run
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
FLAGS: dict[str, Any] = {
    "page_size": 16,
    "chunked_prefill_size": 64,
    "kv_units": 2,
    "num_threads": 1,
    "schedule_conservativeness": 0.0,
    "max_total_tokens": 4096,
}
RETRACTS = {"test_retract": 3}  # decode, every third step
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HEADS,
    "qwen3_next": HEADS,
    "granitemoehybrid": {},
    "falcon_h1": {"mamba_n_groups": 1, "mamba_rms_norm": False},  # ranks share the group
}
CELLS = {
    "delta rule, TP 2 to TP 4": ("qwen3_5_text", Cell("nixl", (2, 1), (4, 1), "on", "prefill")),
    "delta rule, TP 4 to PP 2": ("qwen3_next", Cell("mooncake", (4, 1), (1, 2), "off", "recompute")),
    "Mamba2, one to TP 2": ("granitemoehybrid", Cell("mooncake", (1, 1), (2, 1), "off", "recompute")),
    "Mamba2, TP 2 to PP 2": ("falcon_h1", Cell("nixl", (2, 1), (1, 2), "on", "recompute")),
}


@pytest.mark.skipif(linear_kernel() is None, reason="bits are promised of the C kernel of bf16")
@pytest.mark.parametrize("name", CELLS)
def test_states_cross_between_all_ranks(name: str, tmp_path: Path) -> None:
    """In bf16 to the bit. What is retracted is computed again as a prompt, which rounds otherwise: in fp32."""
    family, cell = CELLS[name]
    exact = "PP 2" in name
    numbers: dict[str, Any] = {"dtype": "bfloat16", "reduce_units": 4} if exact else {"dtype": "float32"}
    path = make_tiny_checkpoint(tmp_path, family, dtype=numbers["dtype"], **FIELDS[family])
    shared = prompt_of(70, 9)
    asked = [(f"r{i}", [*shared, *prompt_of(30 + 9 * i, i)], 36 - 4 * i) for i in range(4)]
    flags = {**FLAGS, **numbers}
    alone = {**flags, "chunked_prefill_size": -1, "disable_radix_cache": True}
    with EngineInProcess(path, **alone) as engine:
        for rid, prompt, new in asked:
            engine.add(rid, prompt, max_new_tokens=new, ignore_eos=True)
        engine.run()
        right = dict(engine.tokens)
    with pair_of(cell, path, flags=flags, decode={} if exact else RETRACTS) as pair:
        assert run(pair, asked, turns_between=6) == right
        for worker in pair.workers:
            scheduler = worker.parts.scheduler
            scheduler.check()
            assert scheduler.memory.states is not None and scheduler.memory.states.allocator.counts()["held"] == 0
        assert (pair.workers[1].parts.scheduler.counters.retractions > 0) != exact
        sent, received = (worker.peered.counters() for worker in pair.workers)
        assert received["kv_checksum_verified"] == sent["kv_transfers"] >= len(asked)
        assert (sent.get("posts_of_followers", 0) > 0) == (cell.prefill != (1, 1))
