"""Mixtures of checkpoints whose experts stay packed on a GPU, by Triton's interpreter; run by test_packed_on_gpu.py."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.kernels.triton import experts as kernels
from engine.layers.fused_experts import FusedExperts
from engine.model_files.experts_config import QWEN_NAMES
from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import Checkpoint
from engine.models.expert_mlp import ExpertMLP
from engine.models.expert_parallel import ExpertParallelMLP
from engine.models.load import load_model
from engine.models.part import ModelPart
from engine.parallel.expert_placement import ExpertPlan
from service.flags import ConfigError
from tests.attention.triton.triton_numerics import guarded
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint
from tests.quant.stored_formats import make_both
from tests.quant.test_mxfp4 import with_blocks
from tests.quant.triton_packed import close

TOKENS = (2, 9)  # pairs that are blocks, and sorted ones


@contextmanager
def on_gpu() -> Iterator[None]:
    """Mixtures and their files are those of a GPU."""
    with (
        mock.patch("engine.models.expert_mlp.takes_triton", lambda _: True),
        mock.patch("engine.models.quantized_tensors.takes_triton", lambda _: True),
    ):
        yield


SIZES: dict[str, Any] = {"hidden_size": 160, "moe_intermediate_size": 96, "num_hidden_layers": 2}


def mixture(path: str) -> ExpertMLP:
    model = load_model(path, load_model_config(path), dtype="float32", device="cpu", progress=False)
    found = list(model.mixtures().values())[-1]
    assert isinstance(found, ExpertMLP)
    return found


def check_checkpoint(path: str, name: str, hidden: int) -> None:
    plain = mixture(path)
    with on_gpu():
        packed = mixture(path)
    experts = packed._experts
    assert isinstance(experts, FusedExperts) and experts._gate_up.form is not None and experts._down.form is not None, (
        name
    )
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden)
        close(packed._partial(x), plain._partial(x).double(), 2e-5, name)
    guarded.check()


def check_blocks(folder: Path) -> None:
    """Of gpt-oss."""
    path = make_tiny_checkpoint(
        folder, "gpt_oss", hidden_size=128, intermediate_size=96, quantization_config={"quant_method": "mxfp4"}
    )
    random = torch.Generator().manual_seed(1)
    edit_tensors(folder / "model.safetensors", lambda tensors: with_blocks(tensors, random))
    check_checkpoint(path, "mxfp4", 128)


def check_moves(folder: Path) -> None:
    """Experts of one rank that change places are moved as they are stored, into memory that graphs read."""
    path, _ = make_both(folder, "fp8-blocks", "qwen3_moe", **SIZES)
    plain, config = mixture(path), load_model_config(path)
    assert config.experts is not None
    x = torch.randn(TOKENS[1], SIZES["hidden_size"])
    own = {"dtype": "float32", "device": "cpu", "progress": False, "stored": config.stored}
    with on_gpu(), Checkpoint(path, **own) as checkpoint:
        part = ModelPart(config, checkpoint, experts=ExpertPlan(start={1: [*range(8), 0, 1]}))
        layer = ExpertParallelMLP(part, "model.layers.1.", config.experts, QWEN_NAMES, 1)
        experts = layer.placed.own
        assert isinstance(experts, FusedExperts)
        before = [(tensor.data_ptr(), tensor.clone()) for tensor in experts._tensors]
        layer.placed.take(layer.moved((7, 6, 5, 4, 3, 2, 1, 0, 7, 6)))  # as `layer.take` where graphs are recorded
    changed = [not torch.equal(old, tensor) for (_, old), tensor in zip(before, experts._tensors, strict=True)]
    assert [at for at, _ in before] == [tensor.data_ptr() for tensor in experts._tensors] and all(changed)
    assert {tensor.dtype for tensor in experts._tensors} == {torch.int32}
    close(layer._of(x), plain._partial(x).double(), 2e-5, "moved")
    assert experts._down.form is not None
    experts._down = experts._down._replace(form=experts._down.form._replace(zeros="points"))
    with on_gpu(), pytest.raises(ConfigError, match=r"--enable-eplb: .* in several forms; leave it out"):
        layer.moved((0, 1, 2, 3, 4, 5, 6, 7, 0, 1))


def main() -> None:
    torch.manual_seed(1)
    setattr(kernels, "torch", guarded)  # noqa: B010
    kernels.FEW_PAIRS, kernels.SORT_TILE, kernels.SUM_TILE = 7, 16, 32
    with tempfile.TemporaryDirectory(prefix="tandem-packed-") as folder:
        for name, family in (
            ("awq", "qwen3_moe"),
            ("fp8-blocks", "glm4_moe"),
            ("int8", "glm4_moe"),
            ("fp8-one-scale", "qwen3_moe"),
        ):
            path, _ = make_both(Path(folder) / name, name, family, **SIZES)
            check_checkpoint(path, name, SIZES["hidden_size"])
        check_blocks(Path(folder) / "blocks")
        check_moves(Path(folder) / "moves")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
