"""Several ranks answer as one does: tensor parallel, pipeline stages, and both; however steps are cut, overlapped and repeated.

The wide model needs every KV head of every layer, so a rank whose part is wrong or late shows in the tokens. With
`--reduce-units 4` all logprobs are equal to the bit.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.executor.decode_tapes import DecodeTapes
from engine.kernels.linear import linear_kernel
from engine.messages import LogprobOptions
from engine.model_files.model_config import WIDE_MODEL_PATH
from engine.ranks.rank_parts import check_same_kernels, kernels_here
from service.flags import ConfigError
from tests.cells import in_turn, some
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import engine_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.one_thread import Plays

FLAGS: dict[str, Any] = {"chunked_prefill_size": 64, "page_size": 4, "num_threads": 1, "max_total_tokens": 2048}
PROMPTS = [(150, 1), (7, 2), (64, 3), (33, 4), (7, 2), (90, 6)]  # (length, seed): chunks, a prompt twice
SHAPES = [(2, 1), (4, 1), (1, 2), (2, 2)]
EQUAL: dict[str, Any] = {"reduce_units": 4} if linear_kernel() is not None else {}

WAYS: dict[str, tuple[dict[str, Any], Callable[[Any], int]]] = {  # flags, and what counts that they were at work
    "chunks": ({"chunked_prefill_size": 32}, lambda counters: counters.prefill_steps - 6),
    "retraction": ({"test_retract": 3}, lambda counters: counters.retractions),
    "mixed": ({"chunked_prefill_size": 32, "enable_mixed_chunk": True}, lambda counters: counters.mixed_steps),
    "all": (
        {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "test_retract": 1},
        lambda counters: min(counters.mixed_steps, counters.retractions),
    ),
}


@dataclass(frozen=True)
class Answers:
    """`logprobs`: of tokens and prompts. `counters`: of the scheduler. `depth`: steps in flight."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    counters: Any
    depth: int


def answers(tp_size: int, pp_size: int, *, path: str = WIDE_MODEL_PATH, **flags: Any) -> Answers:
    with engine_of(path, tp_size=tp_size, pp_size=pp_size, **{**FLAGS, **flags}) as engine:
        for i, (length, seed) in enumerate(PROMPTS):
            sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "seed": i, "repetition_penalty": 1.1}
            engine.add(
                str(i), prompt_of(length, seed), logprobs=LogprobOptions(start_len=3), max_new_tokens=12, **sampling
            )
        engine.run()
        return Answers(engine.tokens, engine.all_logprobs(), engine.parts.scheduler.counters, engine.parts.depth)


@cache
def together(tp_size: int, pp_size: int) -> Answers:
    """Of ranks of one machine, which need no flags."""
    return answers(tp_size, pp_size)


@pytest.fixture(scope="module")
def alone() -> Answers:
    return answers(1, 1)


@pytest.fixture(scope="module")
def alone_in_units() -> Answers:
    return answers(1, 1, **EQUAL)


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "nnodes"), some([(4, 1, 2), (2, 2, 2), (4, 1, 4), (1, 4, 4)], tried=[(4, 1, 2), (2, 2, 2)])
)
def test_several_machines_answer_as_one_does(alone: Answers, tp_size: int, pp_size: int, nnodes: int) -> None:
    """Sums of ranks here and there, and states that go from one machine to the next."""
    here = together(tp_size, pp_size)
    there = answers(tp_size, pp_size, nnodes=nnodes, dist_init_addr="127.0.0.1:1")
    assert (there.tokens, there.logprobs) == (here.tokens, here.logprobs)
    assert there.tokens == alone.tokens


@pytest.mark.parametrize(("shape", "stream"), in_turn(SHAPES, ["threaded", "auto"]))
def test_tokens_and_logprobs(alone: Answers, shape: tuple[int, int], stream: str) -> None:
    got = together(*shape) if stream == "auto" else answers(*shape, stream=stream)
    assert got.tokens == alone.tokens
    for rid, values in alone.logprobs.items():
        assert got.logprobs[rid] == pytest.approx(values, abs=0.05), rid


def check(way: str, stream: str, shape: tuple[int, int], alone: Answers) -> None:
    """The cell did what it is named after, and answered as one rank does, to the bit."""
    flags, times = WAYS[way]
    got = answers(*shape, stream=stream, **flags, **EQUAL)
    assert times(got.counters) > 0, "not at work"
    assert got.depth == shape[1] + (stream == "threaded" or shape[1] > 1)
    assert got.tokens == alone.tokens
    if EQUAL:
        assert got.logprobs == alone.logprobs


@pytest.mark.parametrize(
    ("way", "stream", "shape"),
    [
        ("chunks", "inline", (4, 1)),
        ("retraction", "threaded", (2, 1)),
        ("mixed", "threaded", (1, 4)),
        ("all", "threaded", (2, 2)),
        ("all", "threaded", (1, 2)),
    ],
)
def test_however_steps_are_cut(alone_in_units: Answers, way: str, stream: str, shape: tuple[int, int]) -> None:
    check(way, stream, shape, alone_in_units)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), *SHAPES, (1, 3), (1, 4), (4, 2), (2, 4)])
@pytest.mark.parametrize("stream", ["inline", "threaded"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_on_every_shape(alone_in_units: Answers, way: str, stream: str, shape: tuple[int, int]) -> None:
    if shape[1] == 1 or stream == "threaded":
        check(way, stream, shape, alone_in_units)


# ---- models that ranks cut in other ways

# KV heads replicated and not, biases of columns and of rows, norms of heads, tied heads, uneven vocabulary.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "two KV heads": ("qwen3", {"num_key_value_heads": 2}),
    "tied and biased": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "eight KV heads": ("qwen2", {"num_key_value_heads": 8, "vocab_size": 275}),
}
# Wide enough that another order of a sum shows in some result.
SIZES = {"num_attention_heads": 8, "head_dim": 32, "hidden_size": 128, "intermediate_size": 832, "num_hidden_layers": 4}


@pytest.mark.parametrize(("name", "shape"), in_turn([*MODELS], [(4, 1), (2, 2), (2, 1)]))
def test_ranks_compute_what_one_rank_does(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """To the bit in bf16, and nearly in float32."""
    family, overrides = MODELS[name]
    path = make_tiny_checkpoint(tmp_path, family, dtype="bfloat16", **SIZES | overrides)
    for flags in ({"dtype": "float32"}, *([EQUAL] if EQUAL else [])):
        alone, got = (answers(*one, path=path, **flags) for one in ((1, 1), shape))
        assert got.tokens == alone.tokens, flags
        for rid, values in alone.logprobs.items():
            assert got.logprobs[rid] == (values if flags is EQUAL else pytest.approx(values, abs=1e-4)), flags


# ---- what must be alike on all ranks


def by_thread(plays: Plays) -> Counter[str]:
    return Counter(thread.name for thread, _ in plays)


@pytest.mark.skipif(len(kernels_here()) < 3, reason="tapes need all C kernels")
@pytest.mark.parametrize(("tp_size", "pp_size"), some([(2, 1), (2, 2)], tried=[(2, 1)]))
def test_all_ranks_play_tapes_and_one_that_drops_its_own_stays_in_step(
    alone: Answers, plays: Plays, monkeypatch: pytest.MonkeyPatch, tp_size: int, pp_size: int
) -> None:
    assert answers(tp_size, pp_size).tokens == alone.tokens
    num_ranks, before, compare = tp_size * pp_size, by_thread(plays), DecodeTapes._compare
    assert len(before) == num_ranks and len(set(before.values())) == 1, before
    plays.clear()

    def differs(
        self: DecodeTapes, kind: tuple[int, bool], recorded: Any, played: list[Tensor], computed: list[Tensor]
    ) -> Tensor:
        if threading.current_thread().name in ("rank 0", "rank 1"):
            played = [-one for one in played]
        return compare(self, kind, recorded, played, computed)

    monkeypatch.setattr(DecodeTapes, "_compare", differs)
    assert answers(tp_size, pp_size).tokens == alone.tokens
    again = by_thread(plays)
    assert 0 < again["rank 1" if num_ranks == 2 else "rank 0"] < max(again.values()), "no rank has dropped a tape"


def test_ranks_that_compute_by_other_kernels_are_refused() -> None:
    check_same_kernels(["linear.c"], {1: ["linear.c"]})
    with pytest.raises(ConfigError, match=r"rank 2 has no C kernels, the leader the C kernels linear.c, tape.c"):
        check_same_kernels(["linear.c", "tape.c"], {1: ["linear.c", "tape.c"], 2: []})


def test_equal_sums_are_refused_where_products_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--reduce-units 4: only bf16 .* --dtype bfloat16 in place of float32"):
        EngineInProcess(WIDE_MODEL_PATH, dtype="float32", reduce_units=4)
    monkeypatch.setattr("engine.device.machine.linear_kernel", lambda: None)
    with pytest.raises(ConfigError, match="--reduce-units 4: needs the C kernel"):
        EngineInProcess(WIDE_MODEL_PATH, reduce_units=4)
