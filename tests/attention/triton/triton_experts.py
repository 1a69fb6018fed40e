"""Mixtures of experts by the interpreter, beside torch's operators; run by test_triton.py."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.kernels.triton import experts as kernels
from engine.layers import fused_experts
from engine.layers.experts import ExpertRouter
from engine.model_files.experts_config import GPT_OSS_NAMES, ExpertsConfig
from engine.model_files.model_config import load_model_config
from engine.models import expert_mlp
from engine.models.checkpoint import Checkpoint
from engine.models.expert_mlp import ExpertMLP
from engine.models.expert_parallel import ExpertParallelMLP
from engine.models.load import load_model
from engine.models.part import ModelPart
from engine.parallel.expert_placement import ExpertPlan
from tests.attention.triton.triton_numerics import guarded
from tests.models.tiny_checkpoints import make_tiny_checkpoint

HIDDEN = 40  # a tile and a part of one
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "glm4_moe": {"n_group": 2, "topk_group": 1},
    "gpt_oss": {"intermediate_size": 48},
    "qwen3_next": {},
}
SORTED, FEW = 9, 2  # tokens: more and fewer than FEW_PAIRS
TILES = kernels.ExpertTiles(rows=16, columns=32, depth=32, warps=4, stages=2)


def mixtures(family: str, **flags: Any) -> tuple[ExpertMLP, ExpertMLP]:
    """The last layer's, of torch and of Triton."""
    with tempfile.TemporaryDirectory() as folder:
        size = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "head_dim": 16}
        path = make_tiny_checkpoint(Path(folder), family, **size, **FAMILIES.get(family, {}))
        return of_torch(path, flags), of_triton(path, flags)


def of_torch(path: str, flags: dict[str, Any]) -> ExpertMLP:
    config = {"dtype": "float32", "device": "cpu", "progress": False} | flags
    model = load_model(path, load_model_config(path), **config)
    found = list(model.mixtures().values())[-1]
    assert isinstance(found, ExpertMLP)
    return found


def of_triton(path: str, flags: dict[str, Any]) -> ExpertMLP:
    with fused():
        return of_torch(path, flags)


@contextmanager
def fused() -> Iterator[None]:
    """Mixtures take Triton's kernels on any device."""
    before, expert_mlp.takes_triton = expert_mlp.takes_triton, lambda _: True  # type: ignore[assignment]
    try:
        yield
    finally:
        expert_mlp.takes_triton = before


@contextmanager
def tiles(found: kernels.ExpertTiles) -> Iterator[None]:
    setattr(fused_experts, "expert_tiles", lambda *_, **__: found)  # noqa: B010
    yield
    setattr(fused_experts, "expert_tiles", kernels.expert_tiles)  # noqa: B010


def inputs(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def check_family(family: str, **flags: Any) -> None:
    plain, triton = mixtures(family, **flags)
    for tokens in (FEW, SORTED):
        x = inputs(tokens)
        torch.testing.assert_close(triton._partial(x), plain._partial(x), rtol=2e-5, atol=2e-5)
        guarded.check()
    assert torch.equal(triton.loads, plain.loads)
    per_token = triton.loads.sum() / (FEW + SORTED)
    triton.counted.rows = plain.counted.rows = torch.tensor([1])
    for each in (triton, plain):
        each.loads.zero_()
        each._partial(inputs(FEW))
    assert torch.equal(triton.loads, plain.loads) and triton.loads.sum() == per_token, "padding counts"


def check_batches(family: str) -> None:
    """A row has the same bits alone, with few others, and sorted among many at another place."""
    _, triton = mixtures(family)
    x = inputs(SORTED)
    whole = triton._partial(x)
    assert torch.equal(triton._partial(x[:1]), whole[:1])
    assert torch.equal(triton._partial(x[3 : 3 + FEW]), whole[3 : 3 + FEW])
    assert torch.equal(triton._partial(x.flip(0)).flip(0), whole)
    with tiles(replace(TILES, columns=2 * TILES.columns)):  # of fewer pairs an expert
        assert torch.equal(triton._partial(x), whole)


def check_ties() -> None:
    """The lower expert wins; what is no number has experts, each once."""
    sigmoid = ExpertsConfig(count=15, per_token=5, intermediate=8, sigmoid=True, groups=3, chosen_groups=2)
    for config in (sigmoid, ExpertsConfig(count=15, per_token=5, intermediate=8)):
        weight = torch.randn(15, HIDDEN, generator=torch.Generator().manual_seed(1))
        weight[[3, 7, 8]] = weight[[2, 6, 4]]
        bias = torch.arange(15) % 3 * 0.1 if config.sigmoid else None
        x = torch.cat([torch.zeros(1, HIDDEN), inputs(4), torch.full((1, HIDDEN), torch.nan)])
        chosen, weights = fused_experts.FusedRouter(weight, bias, config, loads=None)(x)
        expected, expected_weights = ExpertRouter(weight, bias, config)(x)
        assert torch.equal(chosen[:-1].long(), expected[:-1])
        torch.testing.assert_close(weights[:-1], expected_weights[:-1])
        assert weights[-1].isnan().all(), "numbers where there are none"
        last = chosen[-1].tolist()
        assert len(set(last)) == 5 and min(last) >= 0 and max(last) < 15


def check_long_steps() -> None:
    """Tiles of more rows, columns in the middle of one; every token has the same experts."""
    plain, triton = mixtures("gpt_oss", reduce_units=2)
    x = inputs(1).expand(SORTED, -1) + 0.01 * inputs(SORTED)
    for found in (replace(TILES, rows=32, columns=16), replace(TILES, rows=64, columns=64, depth=16)):
        with tiles(found):
            torch.testing.assert_close(triton._partial(x), plain._partial(x), rtol=2e-5, atol=2e-5)
        guarded.check()


def check_sorted_rows() -> None:
    """As the ranks of expert parallelism call them: rows of other ranks come last."""
    plain, triton = mixtures("qwen3_moe")
    for tokens in (FEW, 2 * SORTED):
        rows = torch.bincount(torch.arange(tokens - 2) ** 2 % 7, minlength=8)
        x = inputs(tokens)
        for found, expected in zip(triton._experts(x, rows), plain._experts(x, rows), strict=True):
            torch.testing.assert_close(found[:-2], expected[:-2], rtol=2e-5, atol=2e-5)
        guarded.check()


def check_whole_experts() -> None:
    """Expert parallelism of one rank, which has copies of experts; padding is not counted."""
    config = {"hidden_size": HIDDEN, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_checkpoint(Path(folder), "gpt_oss", **config, **FAMILIES["gpt_oss"])
        plain, found = of_torch(path, {}), load_model_config(path)
        assert found.experts is not None
        with fused(), Checkpoint(path, dtype="float32", device="cpu", progress=False) as checkpoint:
            part = ModelPart(found, checkpoint, experts=ExpertPlan(start={0: [2, 0, 1, 2, 3, 0]}))
            mixture = ExpertParallelMLP(part, "model.layers.0.", found.experts, GPT_OSS_NAMES, 0)
    x = inputs(SORTED)
    torch.testing.assert_close(mixture._of(x), plain._partial(x), rtol=2e-5, atol=2e-5)
    assert torch.equal(mixture.loads, plain.loads)
    mixture.counted.rows = torch.tensor([0])
    mixture._of(x)
    assert torch.equal(mixture.loads, plain.loads)
    guarded.check()


def check_roundings() -> None:
    """Half floats; the interpreter multiplies no bf16, in which one rank's sums leave the kernel rounded."""
    plain, _ = mixtures("qwen3_moe")
    _, triton = mixtures("qwen3_moe", dtype="float16")
    x = inputs(SORTED).half()
    torch.testing.assert_close(triton._partial(x), plain._partial(x.float()), rtol=2**-9, atol=2**-9)
    answers, weights = inputs(FEW * 3), torch.rand(FEW, 3)
    found = kernels.weighed_sum(answers, weights, shared=None, gate=None, dtype=torch.bfloat16)
    expected = (answers.view(FEW, 3, HIDDEN) * weights.unsqueeze(2)).sum(1)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7)


def check_take() -> None:
    """Experts are moved into memory that graphs read."""
    (_, one), (_, other) = mixtures("gpt_oss"), mixtures("gpt_oss")
    experts = one._experts
    assert isinstance(experts, fused_experts.FusedExperts)
    for tensor in experts._tensors:
        tensor.zero_()
    experts.take(other._experts)  # type: ignore[arg-type]
    assert torch.equal(one._partial(inputs(FEW)), other._partial(inputs(FEW)))


def main() -> None:
    setattr(kernels, "torch", guarded)  # noqa: B010
    kernels.FEW_PAIRS, kernels.SORT_TILE, kernels.SUM_TILE = 2 * FEW + 3, 16, 32
    for family in FAMILIES:
        check_family(family)
    check_family("qwen3_next", reduce_units=2)
    check_batches("gpt_oss")
    check_ties()
    check_long_steps()
    check_sorted_rows()
    check_whole_experts()
    check_roundings()
    check_take()


if __name__ == "__main__":
    with torch.inference_mode(), np.errstate(invalid="ignore"):  # a token without numbers
        main()
    sys.exit(0)
