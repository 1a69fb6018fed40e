"""Writes tiny checkpoints in each format, and their float twins. The packing here is written down from the formats' own words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint


class Stored(NamedTuple):
    """What a module has in place of its weight, and the floats that this stands for."""

    tensors: dict[str, Tensor]
    floats: Tensor


def _rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers [out, in], scales fp16 [out, groups] and zeros [out, groups]."""
    outputs, inputs = weight.shape
    grouped = weight.float().view(outputs, -1, group)
    least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((most - least) / (2**bits - 1)).half()
    zeros = (-least / scales.float()).round().clamp(1, 2**bits - 1)
    values = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return values.view(outputs, inputs).int(), scales, zeros.int()


def _floats(values: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (values - zeros[:, groups]).float() * scales.float()[:, groups]


def _words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, n / each] int32 of [rows, n]: place i of a word holds number order[i] of its values."""
    each = 32 // bits
    parts = values.long().view(len(values), -1, each)
    words = sum(parts[:, :, number] << bits * place for place, number in enumerate(order or range(each)))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def awq(weight: Tensor) -> Stored:
    values, scales, zeros = _rounded(weight, 4, 32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _words(values.t().contiguous(), 4, order),
        "qzeros": _words(zeros.t().contiguous(), 4, order),
        "scales": scales.t().contiguous(),
    }
    return Stored(tensors, _floats(values, scales, zeros, torch.arange(weight.shape[1]) // 32))


def gptq(weight: Tensor, *, bits: int = 4, less_one: int = 1, shuffled: bool = False) -> Stored:
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // 32
    if shuffled:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        values, scales, zeros = _rounded(weight[:, order], bits, 32)
        back = order.argsort()
        values, groups = values[:, back], groups[back]
    else:
        values, scales, zeros = _rounded(weight, bits, 32)
    tensors = {
        "qweight": _words(values, bits).t().contiguous(),
        "qzeros": _words((zeros - less_one).t().contiguous(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": groups.int(),
    }
    return Stored(tensors, _floats(values, scales, zeros, groups))


def packed(weight: Tensor, *, bits: int = 4, zeros: bool = False) -> Stored:
    values, scales, found = _rounded(weight, bits, 32)
    found = found if zeros else torch.full_like(found, 2 ** (bits - 1))
    tensors = {
        "weight_packed": _words(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = _words(found.t().contiguous(), bits).t().contiguous()
    return Stored(tensors, _floats(values, scales, found, torch.arange(weight.shape[1]) // 32))


def int8(weight: Tensor, *, whole: bool = False) -> Stored:
    most = weight.float().abs().amax() if whole else weight.float().abs().amax(1, keepdim=True)
    scales = (most / 127.5).bfloat16()
    values = (weight.float() / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return Stored(
        {"weight": values, "weight_scale": scales.reshape(-1) if whole else scales}, values.float() * scales.float()
    )


def fp8(weight: Tensor, *, scale: str) -> Stored:
    """`scale`: of "blocks" of 128, "outputs" or "all"."""
    outputs, inputs = weight.shape
    block = {"blocks": (128, 128), "outputs": (1, inputs), "all": (outputs, inputs)}[scale]
    rows, columns = torch.arange(outputs) // block[0], torch.arange(inputs) // block[1]
    cell = rows[:, None] * (int(columns[-1]) + 1) + columns
    most = torch.zeros(int(cell.max()) + 1).scatter_reduce_(0, cell.flatten(), weight.float().abs().flatten(), "amax")
    scales = most / 448
    values = (weight.float() / scales[cell]).to(torch.float8_e4m3fn)
    named = scales.view(int(rows[-1]) + 1, -1)
    tensors = {
        "blocks": {"weight_scale_inv": named},
        "outputs": {"weight_scale": named},
        "all": {"weight_scale": scales[0]},
    }
    extra = {"input_scale": torch.tensor(0.5)} if scale == "all" else {}
    return Stored({"weight": values, **tensors[scale], **extra}, values.float() * scales[cell])


def _compressed(form: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": kind, **weights}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}, gptq),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": 32}, lambda w: gptq(w, bits=8)),
    "gptq-v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, less_one=0)),
    "gptq-by-activation": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda w: gptq(w, shuffled=True)),
    "packed-4": (_compressed("pack-quantized", 4, group_size=32), packed),
    "packed-4-zeros": (
        _compressed("pack-quantized", 4, group_size=32, symmetric=False),
        lambda w: packed(w, zeros=True),
    ),
    "packed-8": (_compressed("pack-quantized", 8), lambda w: packed(w, bits=8)),
    "int8": (_compressed("int-quantized", 8), int8),
    "int8-one-scale": (_compressed("int-quantized", 8), lambda w: int8(w, whole=True)),
    "float8": (_compressed("float-quantized", 8, "float"), lambda w: fp8(w, scale="outputs")),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda w: fp8(w, scale="blocks")),
    "fp8-one-scale": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda w: fp8(w, scale="all")),
}


def make_both(folder: Path, name: str, family: str, **sizes: Any) -> tuple[str, str]:
    """A quantized checkpoint, and one of the floats that its weights stand for: their paths."""
    config, store = FORMATS[name]
    paths = [
        make_tiny_checkpoint(folder / which, family, **sizes, **fields)
        for which, fields in (("quantized", {"quantization_config": config}), ("twin", {}))
    ]

    def replace_weights(tensors: dict[str, Tensor]) -> None:
        for weight in [name for name in tensors if name.endswith("_proj.weight")]:
            module = weight.removesuffix(".weight")
            tensors |= {f"{module}.{part}": tensor for part, tensor in store(tensors.pop(weight)).tensors.items()}

    def keep_floats(tensors: dict[str, Tensor]) -> None:
        for weight in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[weight] = store(tensors[weight]).floats

    edit_tensors(Path(paths[0]) / "model.safetensors", replace_weights)
    edit_tensors(Path(paths[1]) / "model.safetensors", keep_floats)
    return paths[0], paths[1]
