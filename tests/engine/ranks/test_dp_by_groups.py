"""DP attention as on GPUs, with gloo on CPUs in the place of NCCL: rows and their sums by process groups. No GPU is in it."""

from typing import Any

import pytest

from service.flags import ConfigError
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted
from tests.cells import some
from tests.engine.device.test_gpu_memory import StandIn
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.engine.ranks.test_dp_attention import EQUAL, SIZES, UNITS, answers_by, answers_of_one
from tests.models.tiny_checkpoints import make_tiny_checkpoint

GROUPS: dict[str, Any] = {"by_groups": True, "stream": "threaded", "disable_cuda_graph": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("dp") / "model", "qwen3", dtype="bfloat16", **SIZES)


@pytest.mark.parametrize(
    ("shape", "flags", "where"),
    some(
        [
            ((2, 2), {"chunked_prefill_size": 32, "enable_mixed_chunk": True}, [0, 1, 0, 1, 0, 1]),
            ((4, 2), {}, [0, 0, 0, 0, 0, 1]),
            ((4, 4), {"stream_delay_s": 0.002}, [0, 1, 2, 2, 1, 0]),  # rank 3 has nothing
        ],
        tried=[((4, 2), {}, [0, 0, 0, 0, 0, 1])],
    ),
)
def test_ranks_that_exchange_rows_by_groups_answer_as_one_does(
    model: str, shape: tuple[int, int], flags: dict[str, Any], where: list[int]
) -> None:
    alone = answers_of_one(model, **EQUAL)
    got, _ = answers_by(model, shape, where, **GROUPS, **flags)
    assert got.tokens == alone.tokens
    if UNITS:
        assert got.logprobs == alone.logprobs


MEASURED: dict[str, Any] = {
    **GROUPS,
    "mem_fraction_static": 0.8,
    "max_total_tokens": None,
    "chunked_prefill_size": 32,
    "max_running_requests": 4,
    "context_length": 1024,
    **EQUAL,
}


def test_dp_ranks_measure_and_warm_up_together(model: str) -> None:
    """The stand-ins' GPUs have 9 and 6 MiB. Each DP rank has pages for its own."""
    gauges = [StandIn(total=9 << 20, peak=1 << 20), StandIn(total=6 << 20, peak=1 << 20)]
    left = list(gauges)
    with dp_ranks(model, tp_size=2, dp_size=2, gauge=left.pop, **MEASURED) as group:
        pages = [engine.parts.pool.num_pages for engine in group.engines]
        assert len(set(pages)) == 2 and all(gauge.calls for gauge in gauges)
        for rank, engine in enumerate(group.engines):
            engine.add(str(rank), prompt_of(40, rank), max_new_tokens=8)
        group.run()
        found = [engine.tokens[str(rank)] for rank, engine in enumerate(group.engines)]
    with EngineInProcess(model, **EQUAL) as plain:
        assert found == [plain.answer(str(rank), prompt_of(40, rank), max_new_tokens=8) for rank in range(2)]


def test_steps_that_only_some_dp_ranks_hold_are_refused(model: str) -> None:
    """Warm-ups would take other steps on each."""
    flags = {**MEASURED, "chunked_prefill_size": 1024, "max_total_tokens": 512}
    with (
        pytest.raises(ConfigError, match=r"--chunked-prefill-size: a step of 1024 tokens .* this DP rank's KV cache"),
        dp_ranks(model, tp_size=2, dp_size=2, gauge=lambda: StandIn(total=9 << 20, peak=1 << 20), **flags),
    ):
        pass


@pytest.mark.timeout(TIMEOUT_S)
def test_dp_ranks_replay_graphs_of_one_size() -> None:
    run_interpreted("tests.engine.ranks.dp_graphs_by_the_interpreter")
