"""Integers of a GGUF file stay integers where our kernel multiplies: the values of the dequantized file, in fewer bytes."""

from collections.abc import Sequence as Many
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from engine.kernels.linear import PackedMatrix, linear_kernel
from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import Checkpoint
from engine.models.load import load_model
from engine.parallel.layout import Cut
from engine.quant.ggml import BLOCK_TYPES
from tests.engine.engine_in_process import prompt_of
from tests.models.reference_attend import Sequence
from tests.models.tiny_gguf import make_tiny_gguf

PROMPT = prompt_of(40, 1)
DOWN, Q, K, V = "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"

needs_kernel = pytest.mark.skipif(linear_kernel() is None, reason="integers are multiplied by our kernel alone")


def opened(file: Path, dtype: str = "bfloat16") -> Checkpoint:
    return Checkpoint(str(file), dtype=dtype, device="cpu", progress=False)


def names(parts: Many[str]) -> list[str]:
    return [f"model.layers.1.{part}.weight" for part in parts]


@needs_kernel
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_those_of_the_dequantized_file(kind: str, family: str, tmp_path: Path) -> None:
    """The rows of a Llama's q and k lie in another order in the file."""
    file, checkpoint = make_tiny_gguf(tmp_path, family, kind)
    exact = load_file(checkpoint / "model.safetensors")
    cases = [([Q, K, V], [256, 128, 128], 256), ([DOWN], [256], 512), ([DOWN], [256], Cut(512, range(96, 416)))]
    cases.append(([Q, K], [Cut(256, range(64, 192)), Cut(128, range(64, 128))], 256))
    with opened(file) as taken:
        for parts, rows, inputs in cases:
            found = taken.take_integers(names(parts), rows, inputs)
            assert found is not None and found.group == 32
            of_rows = [slice(None) if isinstance(cut, int) else slice(cut.taken.start, cut.taken.stop) for cut in rows]
            of_inputs = slice(None) if isinstance(inputs, int) else slice(inputs.taken.start, inputs.taken.stop)
            expected = [exact[name][own, of_inputs] for name, own in zip(names(parts), of_rows, strict=True)]
            assert torch.equal(found.dense(), torch.cat(expected).bfloat16()), parts


def matrices(file: Path) -> list[tuple[str, int]]:
    """Of each linear layer: its first matrix, and the bits of its integers, 0 for floats."""
    model = load_model(str(file), load_model_config(str(file)), dtype="bfloat16", device="cpu", progress=False)
    sites = [(site.shape.parts[0][0], site.linear._matrix) for site in model.linear_sites()]  # type: ignore[attr-defined]
    assert all(isinstance(matrix, PackedMatrix) for _, matrix in sites)
    return [(name, matrix._args.bits) for name, matrix in [*sites, ("head", model._head._matrix)]]  # type: ignore[attr-defined]


@needs_kernel
def test_integers_of_one_type_stay_packed_the_head_too(tmp_path: Path) -> None:
    file, _ = make_tiny_gguf(tmp_path, "qwen2", "Q4_1", tie_word_embeddings=True, kinds={"embed_tokens": Kind.Q8_0})
    bits = dict(matrices(file))
    assert bits.pop("head") == 8 and set(bits.values()) == {4}


@needs_kernel
def test_of_4_and_8_bits_both_take_8(tmp_path: Path) -> None:
    """As files Q4_K_S are: v of some layers in Q5_K."""
    file, checkpoint = make_tiny_gguf(tmp_path, "llama", "Q4_K", kinds={V: Kind.Q5_K})
    exact = load_file(checkpoint / "model.safetensors")
    with opened(file) as taken:
        found = taken.take_integers(names([Q, K, V]), [256, 128, 128], 256)
        assert found is not None and found.bits == 8
        assert torch.equal(found.dense(), torch.cat([exact[name] for name in names([Q, K, V])]).bfloat16())
    assert {bits for name, bits in matrices(file) if name.endswith("q_proj")} == {8}


@needs_kernel
def test_in_a_mixed_file_only_what_cannot_stay_becomes_floats(tmp_path: Path) -> None:
    """As files Q4_K_M are: v of some layers and the output in Q6_K."""
    kinds = {"layers.0.self_attn.v_proj": Kind.Q6_K, "layers.1.mlp.down_proj": Kind.F16, "lm_head": Kind.Q6_K}
    file, checkpoint = make_tiny_gguf(tmp_path, "llama", "Q4_K", kinds=kinds)
    floats = [name for name, bits in matrices(file) if bits == 0]
    assert floats == ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "head"]
    exact, rounded, packed = (
        logits(path, dtype) for path, dtype in ((checkpoint, "float32"), (checkpoint, "bfloat16"), (file, "bfloat16"))
    )
    error, least = (packed - exact).square().mean().sqrt(), (rounded - exact).square().mean().sqrt()
    assert 0 < error < 1.5 * least < 0.1 * exact.std()


def logits(path: Path, dtype: str) -> torch.Tensor:
    model = load_model(str(path), load_model_config(str(path)), dtype=dtype, device="cpu", progress=False)
    return Sequence(model).extend(PROMPT)


def test_elsewhere_they_become_floats(tmp_path: Path) -> None:
    file, _ = make_tiny_gguf(tmp_path, "llama", "Q4_0")
    with opened(file, "float32") as taken:
        assert taken.take_integers(names([DOWN]), [256], 512) is None


@needs_kernel
def test_a_part_that_cuts_a_group_becomes_floats(tmp_path: Path) -> None:
    file, _ = make_tiny_gguf(tmp_path, "llama", "Q4_0")
    with opened(file) as taken:
        assert taken.take_integers(names([DOWN]), [256], Cut(512, range(0, 16))) is None
