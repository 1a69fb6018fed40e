"""Workers that hold whole experts on each rank, or parts of all, share KV: it does not know of experts."""

from pathlib import Path
from typing import Any

import pytest

from engine.kernels.linear import linear_kernel
from tests.e2e.two_engines import disaggregated, run
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FLAGS: dict[str, Any] = {
    "chunked_prefill_size": 32,
    "kv_units": 2,
    "num_threads": 1,
    "max_total_tokens": 2048,
    "dtype": "bfloat16",
    "reduce_units": 2,
    "dist_init_addr": None,
}
MOVING = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "eplb_rebalance_num_iterations": 3}


@pytest.mark.skipif(linear_kernel() is None, reason="bits are promised of the C kernel of bf16")
@pytest.mark.parametrize(
    ("prefill", "decode", "backend"),
    [(MOVING, {}, "nixl"), ({}, MOVING, "mooncake"), ({"tp_size": 2}, MOVING, "nixl")],
    ids=["experts whole in prefill", "in decode", "in decode, cut in prefill"],
)
def test_one_side_holds_whole_experts(
    tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], backend: str
) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe", dtype="bfloat16")
    prompts = [prompt_of(70, 1), prompt_of(9, 2), prompt_of(40, 3)]
    with EngineInProcess(path, **FLAGS) as alone:
        for i, prompt in enumerate(prompts):
            alone.add(str(i), prompt, max_new_tokens=16, temperature=0.0, ignore_eos=True)
        alone.run()
    disagg = {"disaggregation_transfer_backend": backend}
    with disaggregated(path, prefill=prefill, decode=decode, disagg=disagg, **FLAGS) as pair:
        assert run(pair, [(str(i), prompt, 16) for i, prompt in enumerate(prompts)], turns_between=4) == alone.tokens
        for worker, shape in zip(pair.workers, (prefill, decode), strict=True):
            balance = worker.parts.executor.runner.balance
            assert (balance is not None) == (shape is MOVING)
