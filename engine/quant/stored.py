"""Quantized weights in checkpoint layouts.

fp8         weight e4m3 [out, in]; weight_scale_inv of blocks, or weight_scale of outputs or of all
awq         qweight [in, out / 8], qzeros, scales [groups, out]
gptq        qweight [in / 8, out], qzeros, scales [groups, out], g_idx [in]
compressed  weight int8 or e4m3, or weight_packed [out, in / 8]; weight_scale, weight_zero_point,
            weight_g_idx

Sources: AutoAWQ, AutoGPTQ, compressed-tensors, DeepSeek-V3's `weight_dequant`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_files.stored_weights import StoredWeights
from engine.quant.integers import Integers, Weight

# ---- Integers of 4 or 8 bits packed into 32-bit words.

IN_ORDER = {4: (0, 1, 2, 3, 4, 5, 6, 7), 8: (0, 1, 2, 3)}


def unpacked(words: Tensor, order: tuple[int, ...], taken: range) -> Tensor:
    """Unsigned [rows, len(taken)] int16 from `words` [rows, n] i32.

    A word's lowest bits are its integer order[0].
    """
    each = len(order)
    first, end = taken.start // each, -(-taken.stop // each)
    bits = 32 // each
    own = words[:, first:end]
    parts: list[Tensor] = [own] * each
    for place, number in enumerate(order):
        parts[number] = (own >> bits * place) & ((1 << bits) - 1)
    together = torch.stack(parts, dim=-1).flatten(1).to(torch.int16)
    return together[:, taken.start - first * each : taken.stop - first * each]


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MAIN = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")  # any of these: the module is quantized
OTHERS = (
    *("qzeros", "scales", "g_idx", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale"),
    *("input_scale", "input_zero_point", "output_scale", "input_scale_ub", "activation_scale"),
)
KV_SCALES = ("k_scale", "v_scale", "q_scale")  # of quantized caches


class ShapeError(Exception):
    """A tensor does not fit its weight."""


@dataclass(frozen=True, slots=True)
class Source:
    """A module: `get(suffix)` reads a tensor, `rows` and `columns` are this rank's.

    `keeps_e4m3`: return it as it is stored where scales fit the columns.
    """

    get: Callable[[str], Tensor | None]
    shape: tuple[int, int]
    rows: range
    columns: range
    dtype: torch.dtype
    keeps_e4m3: bool = False

    def want(self, suffix: str, shape: Sequence[int | None]) -> Tensor:
        """Raises ShapeError if absent or of another shape (None: any size)."""
        tensor = self.get(suffix)
        if tensor is None:
            raise ShapeError(f"{suffix} is missing")
        if len(tensor.shape) != len(shape) or any(b not in (None, a) for a, b in zip(tensor.shape, shape, strict=True)):
            raise ShapeError(
                f"{suffix} has shape {list(tensor.shape)}, which does not fit a weight of {list(self.shape)}"
            )
        return tensor


def read(stored: StoredWeights, source: Source) -> Weight:
    """Read this rank's part as `Integers` or fp32 floats. Raises ShapeError."""
    if stored.layout == "awq":
        return _awq(source)
    if stored.layout == "gptq":
        return _gptq(source, stored)
    if source.get("weight_packed") is not None:
        return _packed(source)
    return _with_scales(source)


def _awq(source: Source) -> Weight:
    outputs, inputs = source.shape
    words = source.want("qweight", (inputs, outputs // 8))
    scales = source.want("scales", (None, outputs))
    zeros = source.want("qzeros", (len(scales), outputs // 8))
    group = _group_of(source, len(scales))
    own = unpacked(words[source.columns.start : source.columns.stop], AWQ_ORDER, source.rows).t()
    groups = _groups(source, group)
    own_zeros = unpacked(zeros[groups], AWQ_ORDER, source.rows).t()
    return _integers(source, own - 8, _own_scales(scales.t(), source, groups), own_zeros - 8, 4, group)


def _gptq(source: Source, stored: StoredWeights) -> Weight:
    outputs, inputs = source.shape
    each, bits = 32 // stored.bits, stored.bits
    words = source.want("qweight", (inputs // each, outputs))
    scales = source.want("scales", (None, outputs))
    zeros = source.want("qzeros", (len(scales), outputs // each))
    own = unpacked(words.t()[source.rows.start : source.rows.stop], IN_ORDER[bits], source.columns)
    all_zeros = unpacked(zeros, IN_ORDER[bits], source.rows).t()
    if stored.zeros_less_one:
        all_zeros = (all_zeros + 1) & ((1 << bits) - 1)
    half = 1 << (bits - 1)
    return _by_order(source, "g_idx", own - half, scales.t(), all_zeros - half, bits)


def _packed(source: Source) -> Weight:
    outputs, inputs = source.shape
    packed, shape = source.want("weight_packed", (outputs, None)), source.get("weight_shape")
    if shape is not None and shape.tolist() != [outputs, inputs]:
        raise ShapeError(f"weight_shape is {shape.tolist()}, which does not fit a weight of {[outputs, inputs]}")
    bits = 4 if packed.shape[1] == -(-inputs // 8) else 8
    each, half = 32 // bits, 1 << (bits - 1)
    packed = source.want("weight_packed", (outputs, -(-inputs // each)))
    scales = source.want("weight_scale", (outputs, None))
    own = unpacked(packed[source.rows.start : source.rows.stop], IN_ORDER[bits], source.columns) - half
    zeros = None
    if source.get("weight_zero_point") is not None:
        words = source.want("weight_zero_point", (-(-outputs // each), scales.shape[1]))
        zeros = unpacked(words.t(), IN_ORDER[bits], source.rows).t() - half
    return _by_order(source, "weight_g_idx", own, scales, zeros, bits)


def _by_order(source: Source, name: str, values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Weight:
    """Integers, or floats if groups are scattered (`desc_act`). `zeros`: own rows, all groups."""
    group, index = _group_of(source, scales.shape[1]), source.get(name)
    if index is not None and not torch.equal(index.long(), torch.arange(source.shape[1]) // group):
        own = source.want(name, (source.shape[1],)).long()[source.columns.start : source.columns.stop]
        whole = values.float() if zeros is None else values.float() - zeros.float().index_select(1, own)
        return whole * scales[source.rows.start : source.rows.stop].float().index_select(1, own)
    groups = _groups(source, group)
    return _integers(
        source, values, _own_scales(scales, source, groups), None if zeros is None else zeros[:, groups], bits, group
    )


def _with_scales(source: Source) -> Weight:
    outputs, inputs = source.shape
    weight = source.want("weight", (outputs, inputs))[
        source.rows.start : source.rows.stop, source.columns.start : source.columns.stop
    ]
    scales = source.get("weight_scale_inv")
    scales = source.get("weight_scale") if scales is None else scales
    if scales is None:
        raise ShapeError("weight_scale is missing")
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    down, across = scales.shape
    if down in (1, outputs) and weight.dtype == torch.int8:
        return _bytes(source, weight, scales.expand(outputs, -1))
    if not 0 < down <= outputs or not 0 < across <= inputs:
        raise ShapeError(
            f"its scales have shape {list(scales.shape)}, which does not fit a weight of {list(source.shape)}"
        )
    each = _whole_blocks(source, across) if source.keeps_e4m3 and weight.dtype == torch.float8_e4m3fn else 0
    if each:
        return Integers(weight.contiguous(), _spread(scales, source, each), None, 8, each, source.dtype)
    return weight.float() * _spread(scales, source, 1)


def _bytes(source: Source, weight: Tensor, scales: Tensor) -> Weight:
    group, zeros = _group_of(source, scales.shape[1]), source.get("weight_zero_point")
    groups = _groups(source, group)
    own = None
    if zeros is not None:
        own = zeros.reshape(-1, scales.shape[1]).expand(source.shape[0], -1)
        own = own[source.rows.start : source.rows.stop, groups].to(torch.int16)
    return _integers(source, weight, _own_scales(scales, source, groups), own, 8, group)


def _spread(scales: Tensor, source: Source, each: int) -> Tensor:
    steps = ((source.rows, 1), (source.columns, each))
    rows, columns = (
        torch.arange(taken.start, taken.stop, step) // _block(size, count)
        for (taken, step), size, count in zip(steps, source.shape, scales.shape, strict=True)
    )
    return scales.float()[rows][:, columns]


def _whole_blocks(source: Source, across: int) -> int:
    """Inputs of a scale, 0 where the columns are not whole blocks."""
    columns, inputs = source.columns, source.shape[1]
    each = _block(inputs, across)
    is_whole = columns.start % each == 0 and (columns.stop % each == 0 or columns.stop == inputs)
    return min(each, len(columns)) if across == 1 or is_whole else 0


def _block(size: int, count: int) -> int:
    """128 if that gives `count` blocks, else a divisor of the size."""
    if -(-size // 128) == count and count > 1:
        return 128
    if size % count:
        raise ShapeError(f"{count} scales do not divide {size} rows or columns")
    return size // count


def _group_of(source: Source, groups: int) -> int:
    inputs = source.shape[1]
    if groups == 0 or inputs % groups:
        raise ShapeError(f"{groups} groups do not divide {inputs} inputs")
    return inputs // groups


def _groups(source: Source, group: int) -> slice:
    """Raises ShapeError if a cut splits a group."""
    columns, inputs = source.columns, source.shape[1]
    if group < inputs and (columns.start % group or columns.stop % group):
        raise ShapeError(
            f"its groups of {group} inputs do not divide a rank's {len(columns)} of {inputs}; take fewer ranks (--tp-size)"
        )
    return slice(0, 1) if group == inputs else slice(columns.start // group, columns.stop // group)


def _own_scales(scales: Tensor, source: Source, groups: slice) -> Tensor:
    return scales[source.rows.start : source.rows.stop, groups].float()


def _integers(source: Source, values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> Integers:
    offsets = None if zeros is None or not zeros.any() else -zeros.float() * scales
    return Integers(
        values.to(torch.int8).contiguous(),
        scales.contiguous(),
        None if offsets is None else offsets.contiguous(),
        bits,
        min(group, len(source.columns)),
        source.dtype,
    )
