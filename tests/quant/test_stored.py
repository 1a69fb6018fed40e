"""Quantized checkpoints of every format beside the floats that they stand for: alone, over ranks and stages, with adapters' shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.linear import PackedMatrix, linear_kernel
from engine.model_files.drafter_config import nextn_of
from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import Checkpoint
from engine.models.load import load_model
from engine.parallel.layout import Cut
from engine.quant.integers import SCHEMES, Integers, columns_of, dense_of, quantized
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.reference_attend import Sequence
from tests.models.test_draft_models import load, of_the_engine
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint
from tests.quant.stored_formats import FORMATS, make_both

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
PROMPT = prompt_of(40, 1)


def logits(path: str, *, dtype: str = "float32") -> torch.Tensor:
    return Sequence(load_model(path, load_model_config(path), dtype=dtype, device="cpu", progress=False)).extend(PROMPT)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_floats(name: str, tmp_path: Path) -> None:
    stored, twin = make_both(tmp_path, name, "qwen3", **SIZES)
    assert (logits(stored) - logits(twin)).abs().max() < 1e-4
    if linear_kernel() is not None:  # in bf16 integers stay integers: nearer to the floats than the floats in bf16
        exact = logits(twin)
        packed, rounded = (
            (logits(path, dtype="bfloat16") - exact).square().mean().sqrt() / exact.std() for path in (stored, twin)
        )
        assert packed < 1.5 * rounded < 0.1


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("name", ["awq", "packed-4-zeros", "int8", "fp8-blocks"])
def test_fused_matrices_and_experts(family: str, name: str, tmp_path: Path) -> None:
    stored, twin = make_both(tmp_path, name, family, **SIZES)
    assert (logits(stored) - logits(twin)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["awq", "fp8-blocks"])
def test_an_mtp_layer_of_a_hybrid(name: str, tmp_path: Path) -> None:
    """Of which attention and experts are quantized; the matrix before them is not."""
    own = {"mtp_num_hidden_layers": 1, "linear_value_head_dim": 16}
    paths = make_both(tmp_path, name, "qwen3_next", **own, **SIZES)
    stored, twin = (of_the_engine(load(path, nextn_of(load_model_config(path), flag=""))) for path in paths)
    assert all((one - other).abs().max() < 1e-3 for one, other in zip(stored, twin, strict=True))


@pytest.mark.skipif(linear_kernel() is None, reason="integers are multiplied by our kernel alone")
@pytest.mark.parametrize("name", ["awq", "gptq", "packed-8", "int8"])
def test_integers_stay_packed(name: str, tmp_path: Path) -> None:
    stored, _ = make_both(tmp_path, name, "qwen3", dtype="bfloat16", **SIZES)
    model = load_model(stored, load_model_config(stored), dtype="bfloat16", device="cpu", progress=False)
    for site in model.linear_sites():
        matrix = site.linear._matrix  # type: ignore[attr-defined]
        assert isinstance(matrix, PackedMatrix) and matrix._args.bits == (8 if name in ("packed-8", "int8") else 4)


FP8 = [("phi3", "fp8-blocks"), ("glm4_moe", "fp8-blocks"), ("qwen3", "float8"), ("qwen3", "fp8-one-scale")]


@pytest.mark.parametrize(("family", "name"), FP8)
def test_fp8_that_a_gpu_keeps_stands_for_the_same_floats(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here layers make floats of it; triton_packed.py and triton_packed_experts.py multiply it."""
    stored, _ = make_both(tmp_path, name, family, **SIZES)
    expected = logits(stored)
    monkeypatch.setattr("engine.models.quantized_tensors.takes_triton", lambda device: device.type == "cpu")
    assert torch.equal(logits(stored), expected)


def test_fp8_is_kept_where_a_cut_parts_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = make_both(tmp_path, "fp8-blocks", "qwen3", **SIZES)
    name, stored_as = "model.layers.0.mlp.down_proj.weight", load_model_config(stored).stored
    with Checkpoint(stored, dtype="bfloat16", device="cpu", progress=False, stored=stored_as) as checkpoint:
        assert checkpoint.take_integers([name], [128], 192) is None, "a CPU keeps it"
        monkeypatch.setattr("engine.models.quantized_tensors.takes_triton", lambda _: True)
        for cut, groups in ((range(192), 2), (range(128), 1), (range(128, 192), 1)):
            part = checkpoint.take_integers([name], [128], Cut(192, cut))
            assert part is not None and part.is_float and part.scales.shape == (128, groups)
        assert checkpoint.take_integers([name], [128], Cut(192, range(96))) is None


def test_columns_that_cut_groups_are_floats() -> None:
    weight = quantized(torch.randn(8, 80, dtype=torch.bfloat16), SCHEMES["int4wo-32"])
    for columns, packed in ((slice(0, 48), False), (slice(16, 80), False), (slice(32, 80), True)):
        part = columns_of(weight, columns)
        assert isinstance(part, Integers) is packed and torch.equal(dense_of(part), weight.dense()[:, columns])


def answers(engine: EngineInProcess) -> list[int]:
    return engine.answer("a", PROMPT, max_new_tokens=16)


@pytest.mark.parametrize("name", ["awq", "gptq-by-activation", "packed-4", "int8", "fp8-blocks"])
def test_ranks_and_stages_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    stored, twin = make_both(tmp_path, name, "qwen3", **SIZES)
    with EngineInProcess(stored) as alone, EngineInProcess(twin) as floats:
        expected = answers(alone)
        assert answers(floats) == expected and alone.parts.model.signature() != floats.parts.model.signature()
    for sizes in ({"tp_size": 2}, {"pp_size": 2}):
        with ranks(stored, **sizes) as several:
            assert answers(several.engine) == expected, sizes


def test_a_cut_through_a_group_is_refused(tmp_path: Path) -> None:
    stored, _ = make_both(tmp_path, "awq", "qwen3", **SIZES | {"intermediate_size": 96})
    name, stored_as = "model.layers.0.mlp.down_proj.weight", load_model_config(stored).stored
    said = r"down_proj: its groups of 32 inputs do not divide a rank's 48 of 96; take fewer ranks"
    with Checkpoint(stored, dtype="bfloat16", device="cpu", progress=False, stored=stored_as) as checkpoint:
        assert checkpoint.take_integers([name], [128], 96) is not None
        with pytest.raises(ConfigError, match=said):
            checkpoint.take_integers([name], [128], Cut(96, range(48)))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; take a checkpoint in bf16"),
    ({"bits": 4}, "quant_method 'none' is not supported"),
    ({"quant_method": "awq", "bits": 3}, "bits: AWQ of 3 bits is not supported, only of 4"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: the packing gemv is not supported, only gemm"),
    ({"quant_method": "gptq", "bits": 3}, "bits: GPTQ of 3 bits is not supported, only of 4 and 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: marlin is not supported"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: e5m2 is not supported, only e4m3"),
    (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        "format: marlin-24 is not supported, only int-quan",
    ),
    (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        "config_groups: must have weights of one size, has 0",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 2, "type": "int"}}},
        },
        "num_bits: int of 2 bits as pack-quantized is not supported",
    ),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_other_formats_are_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3", quantization_config=config, **SIZES)
    with pytest.raises(ConfigError) as caught:
        load_model_config(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("awq", "scales", "q_proj: scales is missing"),
        ("gptq", "qzeros", "q_proj: qzeros is missing"),
        ("awq", "qweight", "is in no|not part of the model"),
        ("packed-4", "weight_scale", "q_proj: weight_scale is missing"),
    ],
)
def test_a_missing_part_is_named(name: str, part: str, said: str, tmp_path: Path) -> None:
    stored, _ = make_both(tmp_path, name, "qwen3", **SIZES)
    edit_tensors(Path(stored) / "model.safetensors", lambda t: t.pop(f"model.layers.0.self_attn.q_proj.{part}"))
    with pytest.raises(ConfigError, match=said):
        logits(stored)


def test_a_part_of_another_shape_is_named(tmp_path: Path) -> None:
    stored, _ = make_both(tmp_path, "awq", "qwen3", **SIZES)
    name = "model.layers.0.self_attn.q_proj.qweight"
    edit_tensors(Path(stored) / "model.safetensors", lambda t: t.update({name: t[name][:-1].contiguous()}))
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: .*q_proj: qweight has shape \[127, 8\], which does not fit"
    ):
        logits(stored)
