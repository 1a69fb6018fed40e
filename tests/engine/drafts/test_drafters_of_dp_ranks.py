"""Drafts with DP attention: each DP rank drafts for itself, all verify together, and answers are those of one rank without drafts.

Ranks draft at different times, and go idle one after another.
"""

from pathlib import Path
from typing import Any

import pytest

from engine.kernels.linear import linear_kernel
from tests.cells import some
from tests.engine.drafts.drafters import always, draft_from, fared
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle

FLAGS: dict[str, Any] = {
    "page_size": 4,
    "max_total_tokens": 1024,
    "num_threads": 1,
    "chunked_prefill_size": 64,
    "dtype": "bfloat16",
    "reduce_units": 4,
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
BY_GROUPS: dict[str, Any] = {"by_groups": True, "stream": "threaded", "disable_cuda_graph": True}
SHAPES: dict[str, dict[str, Any]] = {
    "2 ranks": {"tp_size": 2, "dp_size": 2},
    "4 ranks": {"tp_size": 4, "dp_size": 2},
    "2 ranks by groups": {"tp_size": 2, "dp_size": 2, **BY_GROUPS},
    "4 ranks by groups": {"tp_size": 4, "dp_size": 2, **BY_GROUPS},
}
ASKED = [(40, 30), (9, 12), (33, 24), (5, 30), (21, 3)]  # tokens of prompt and answer
Tokens = dict[str, list[int]]

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="bits are promised of the C kernel of bf16")


def add(engine: EngineInProcess, i: int) -> None:
    length, new = ASKED[i]
    sampling = {} if i % 2 else {"temperature": 0.8, "seed": i, "top_k": 5}
    engine.add(str(i), prompt_of(length, i), max_new_tokens=new, **sampling)


def alone(path: str) -> Tokens:
    with EngineInProcess(path, **FLAGS) as engine:
        for i in range(len(ASKED)):
            add(engine, i)
        engine.run()
        return engine.tokens


def drafted(path: str, prepare: Any, *, where: tuple[int, ...] = (0, 1, 0, 0, 1), **flags: Any) -> tuple[Tokens, Any]:
    """Tokens, and what the drafts of each rank came to; `where`: the DP rank of each request."""
    with dp_ranks(path, **{**FLAGS, **flags}) as group:
        for engine in group.engines:
            prepare(engine.parts.scheduler)
        for i, rank in enumerate(where):
            add(group.engines[rank], i)
        group.run()
        tokens = {rid: ids for engine in group.engines for rid, ids in engine.tokens.items()}
        return tokens, [fared(engine) for engine in group.engines]


@pytest.mark.parametrize("shape", some(SHAPES, tried=["2 ranks", "4 ranks by groups"]))
@pytest.mark.parametrize("kind", ["mixed", "right"])
def test_ngrams(tmp_path: Path, shape: str, kind: str) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3", dtype="bfloat16", **HEADS)
    right = alone(path)

    def prepare(scheduler: Any) -> None:
        draft_from(scheduler, right, kind, most=4)

    found, fares = drafted(path, prepare, speculative_algorithm="NGRAM", **SHAPES[shape])
    assert found == right
    assert all(how.drafts for how in fares)
    if kind == "right":
        assert all(how.drafts == how.accepted for how in fares)


@pytest.mark.parametrize("shape", some(SHAPES, tried=["4 ranks", "2 ranks by groups"]))
@pytest.mark.parametrize("kind", some(["EAGLE", "EAGLE3", "STANDALONE"], tried=["EAGLE3"]))
def test_drafters_beside_the_model(tmp_path: Path, shape: str, kind: str) -> None:
    """The second DP rank has nothing: it joins steps that verify, and drafts nothing."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16", **HEADS)
    if kind == "STANDALONE":
        drafter = make_tiny_checkpoint(tmp_path / "drafter", "qwen3", num_hidden_layers=1, seed=1, **HEADS)
    else:
        drafter = make_tiny_eagle(tmp_path / "drafter", kind, dtype="bfloat16")
    flags = {"speculative_algorithm": kind, "speculative_draft_model_path": drafter, **SHAPES[shape]}
    found, (first, second) = drafted(path, always, where=(0,) * len(ASKED), **flags)
    assert found == alone(path)
    assert first.passes and first.drafts > first.accepted and not second.passes


@pytest.mark.parametrize("shape", some(SHAPES, tried=["2 ranks", "4 ranks by groups"]))
@pytest.mark.parametrize("whole", [True, False], ids=["whole experts", "experts cut"])
@pytest.mark.parametrize("family", some(["glm4_moe", "qwen3_next"], tried=["glm4_moe"]))
def test_layers_of_the_model_that_draft(tmp_path: Path, family: str, whole: bool, shape: str) -> None:
    """MTP: the model's experts are over all ranks, the layer's over those of a DP rank."""
    names = {"glm4_moe": "num_nextn_predict_layers", "qwen3_next": "mtp_num_hidden_layers"}
    path = make_tiny_checkpoint(tmp_path, family, dtype="bfloat16", **HEADS, **{names[family]: 1})
    ep_size = SHAPES[shape]["tp_size"] if whole else 1
    found, fares = drafted(path, always, speculative_algorithm="NEXTN", ep_size=ep_size, **SHAPES[shape])
    assert found == alone(path)
    assert all(how.passes and how.drafts for how in fares)
