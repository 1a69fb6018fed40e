"""DP attention: ranks that attend apart and share the MLPs answer as one rank does; however unequal, idle or late they are.

With `--reduce-units 4` all logprobs are equal to the bit. The model has random weights: the shipped ones have MLPs of zeros.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from engine.kernels.linear import linear_kernel
from engine.messages import LogprobOptions
from engine.ranks.rank_parts import kernels_here
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.engine.ranks.ranks_in_process import FOR_RANKS
from tests.engine.ranks.test_ranks import FLAGS, PROMPTS
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.one_thread import Plays

NEW = [12, 30, 3, 12, 17, 8]  # tokens of each answer: ranks go idle one after another
# Where last bits may differ, fp32 keeps the tokens of random weights; in bf16 two of them come as near as rounding on some CPU.
FP32: dict[str, Any] = {"dtype": "float32", "reduce_units": 0}
UNITS = linear_kernel() is not None
EQUAL: dict[str, Any] = {"reduce_units": 4} if UNITS else FP32
SIZES = {**FOR_RANKS, "intermediate_size": 832}


@dataclass(frozen=True)
class Answers:
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]


def add(engine: EngineInProcess, i: int) -> None:
    (length, seed), sampling = PROMPTS[i], {"temperature": 0.0}
    if not i % 2:
        sampling = {"temperature": 0.8, "seed": i, "repetition_penalty": 1.1}
    logprobs = LogprobOptions(start_len=3)
    engine.add(str(i), prompt_of(length, seed), logprobs=logprobs, max_new_tokens=NEW[i], **sampling)


def answers_of(engines: list[Any]) -> Answers:
    tokens = {rid: ids for engine in engines for rid, ids in engine.tokens.items()}
    return Answers(tokens, {rid: found for engine in engines for rid, found in engine.all_logprobs().items()})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("dp") / "model", "qwen3", dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def alone(model: str) -> Answers:
    return answers_of_one(model, **EQUAL)


def answers_of_one(model: str, **flags: Any) -> Answers:
    with EngineInProcess(model, **FLAGS, **flags) as engine:
        for i in range(len(PROMPTS)):
            add(engine, i)
        engine.run()
        return answers_of([engine])


@pytest.mark.parametrize(
    ("shape", "flags", "where"),
    [
        ((2, 2), {}, [0, 1, 0, 1, 0, 1]),
        ((2, 2), {"disable_overlap_schedule": True}, [1, 1, 1, 1, 1, 1]),  # rank 0 has nothing
        (
            (2, 2),
            {"chunked_prefill_size": 32, "enable_mixed_chunk": False, "disable_cuda_graph": True},
            [0, 0, 0, 0, 0, 1],
        ),
        ((4, 2), {"stream_delay_s": 0.002}, [0, 1, 1, 0, 1, 1]),
        ((4, 4), {}, [0, 1, 2, 2, 1, 0]),  # rank 3 has nothing
    ],
)
def test_it_answers_as_one_rank_does(
    model: str, alone: Answers, shape: tuple[int, int], flags: dict[str, Any], where: list[int]
) -> None:
    got, _ = answers_by(model, shape, where, **flags)
    assert got.tokens == alone.tokens
    if UNITS:
        assert got.logprobs == alone.logprobs


@pytest.mark.skipif(len(kernels_here()) < 3, reason="tapes need all C kernels")
def test_all_ranks_replay_decode_steps_at_one_size(model: str, alone: Answers, plays: Plays) -> None:
    """Also those that have fewer requests, or none: a rank that records or plays what another does not is out of step."""
    got, _ = answers_by(model, (4, 2), [0, 0, 0, 0, 0, 1])
    assert got.tokens == alone.tokens
    counts = Counter(thread for thread, _ in plays)
    assert len(counts) == 4 and len(set(counts.values())) == 1 and min(counts.values()) > 10, counts


def test_requests_that_lose_their_memory_go_on(model: str) -> None:
    """What is computed again differs in the last bits, as on one rank."""
    alone = answers_of_one(model, **FP32)
    got, counters = answers_by(model, (4, 2), [0, 1, 0, 1, 0, 1], test_retract=2, **FP32)
    assert all(one.retractions > 3 for one in counters)
    assert got.tokens == alone.tokens
    for rid, values in alone.logprobs.items():
        assert got.logprobs[rid] == pytest.approx(values, abs=1e-4), rid


def answers_by(model: str, shape: tuple[int, int], where: list[int], **flags: Any) -> tuple[Answers, list[Any]]:
    """What they answer, request i at DP rank `where[i]`, and the counters of each."""
    tp_size, dp_size = shape
    with dp_ranks(model, tp_size=tp_size, dp_size=dp_size, **{**FLAGS, **EQUAL, **flags}) as group:
        for i, rank in enumerate(where):
            add(group.engines[rank], i)
        group.run()
        steps = {group.engines[0].board.last_step(rank) for rank in range(dp_size)}
        assert len(steps) == 1 and steps.pop() > 20, "each rank takes part in every step"
        return answers_of(group.engines), [engine.parts.scheduler.counters for engine in group.engines]


def test_a_rank_whose_step_fails_ends_the_waits_of_the_others(model: str) -> None:
    with pytest.raises(OSError, match="a step fails"), dp_ranks(model, tp_size=2, dp_size=2, **FLAGS) as group:
        executor: Any = group.engines[1].parts.executor

        def fail(plan: Any) -> None:
            raise OSError("a step fails")

        executor.runner.run = fail
        for engine, i in zip(group.engines, (0, 1), strict=True):
            add(engine, i)
        group.run()
