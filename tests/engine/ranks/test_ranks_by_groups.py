"""The path of ranks on GPUs, with gloo on CPUs in the place of NCCL: sums, logits, tokens and hidden states by process groups, and
steps that are measured, recorded and warmed up on all ranks at once. No GPU is in it."""

from pathlib import Path
from typing import Any

import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted
from tests.cells import some
from tests.engine.device.test_gpu_memory import StandIn
from tests.engine.drafts.drafters import always, answers_to, fared
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.engine.ranks.test_ranks import EQUAL, Answers, answers
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle


@pytest.fixture(scope="module")
def alone() -> Answers:
    return answers(1, 1, **EQUAL)


@pytest.mark.parametrize(("tp_size", "pp_size"), some([(2, 1), (1, 2), (2, 2)], tried=[(2, 2)]))
def test_ranks_that_exchange_by_groups_answer_as_one_does(alone: Answers, tp_size: int, pp_size: int) -> None:
    flags = {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "test_retract": 1}
    got = answers(tp_size, pp_size, stream="threaded", by_groups=True, disable_cuda_graph=True, **flags, **EQUAL)
    assert got.counters.mixed_steps and got.counters.retractions and got.depth == pp_size + 1
    assert got.tokens == alone.tokens
    if EQUAL:
        assert got.logprobs == alone.logprobs


@pytest.mark.parametrize(("tp_size", "pp_size"), some([(2, 1), (1, 2)], tried=[(2, 1)]))
def test_ranks_measure_and_warm_up_together_and_the_least_memory_counts(tp_size: int, pp_size: int) -> None:
    """The stand-ins' GPUs have 9 and 6 MiB."""
    gauges = [StandIn(total=9 << 20, peak=1 << 20), StandIn(total=6 << 20, peak=1 << 20)]
    flags: dict[str, Any] = {
        "mem_fraction_static": 0.8,
        "max_total_tokens": None,
        "chunked_prefill_size": 32,
        "max_running_requests": 4,
        "context_length": 256,
        "disable_cuda_graph": True,
    }
    left = list(gauges)
    with ranks(
        WIDE_MODEL_PATH, tp_size=tp_size, pp_size=pp_size, by_groups=True, gauge=left.pop, stream="threaded", **flags
    ) as group:
        engine = group.engine
        assert all(gauge.calls[1:] == ["release", "begin_peak", "peak", "release", "free"] for gauge in gauges)
        (follower,) = group.pools.values()
        least = int(0.8 * (6 << 20)) - (1 << 20)
        assert engine.parts.pool.num_pages == follower.num_pages == least // follower.page_bytes
        engine.answer("r", prompt_of(40, 1))
    with EngineInProcess(WIDE_MODEL_PATH) as plain:
        plain.answer("r", prompt_of(40, 1))
        assert engine.tokens == plain.tokens


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.slow  # of one rank: tests/engine/device/test_decode_graphs.py
def test_ranks_record_the_same_steps() -> None:
    run_interpreted("tests.engine.ranks.rank_graphs_by_the_interpreter")


def test_ranks_that_draft_exchange_in_one_order(tmp_path: Path) -> None:
    """Tokens that were sampled, then which drafts were right."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", num_attention_heads=8, num_key_value_heads=4)
    flags: dict[str, Any] = {"chunked_prefill_size": 32, "num_threads": 1}
    prompts = [prompt_of(40, 1), prompt_of(9, 2)]
    with EngineInProcess(path, **flags) as engine:
        right = answers_to(engine, prompts, new=12)
    drafter = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": make_tiny_eagle(tmp_path / "e", "EAGLE"),
    }
    with ranks(
        path, tp_size=2, stream="threaded", by_groups=True, disable_cuda_graph=True, **flags, **drafter
    ) as group:
        always(group.engine.parts.scheduler)
        assert answers_to(group.engine, prompts, new=12) == right
        assert fared(group.engine).drafts
