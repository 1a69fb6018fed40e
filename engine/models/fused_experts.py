"""Experts that a checkpoint keeps in one tensor a layer (gpt-oss): inputs before outputs, or in blocks of MXFP4, outputs first.

Blocks stay as they are where our kernel multiplies, floats may be quantized (`--quantization`).
"""

from collections.abc import Sequence

import torch

from engine.layers.biased_experts import BiasedExperts
from engine.layers.linear import kernel_on
from engine.model_files.experts_config import ClampedGate
from engine.models.part import ModelPart
from engine.parallel.layout import Cut
from engine.quant.integers import Weight
from engine.quant.mxfp4 import BLOCK, mxfp4_codes, mxfp4_values


def load_fused_experts(
    part: ModelPart, prefix: str, gate: ClampedGate, experts: Sequence[int], *, count: int, cut: Cut, segments: int
) -> BiasedExperts:
    """The products of `experts`, in any order, of `count`, of whose intermediate this rank has `cut`. `prefix`: of the experts."""
    hidden, checkpoint = Cut.whole(part.config.hidden_size), part.checkpoint
    own = Cut(count, range(min(experts), max(experts) + 1))
    order = [expert - own.taken.start for expert in experts]
    names = f"{prefix}gate_up_proj", f"{prefix}down_proj"
    of_names = _blocks if checkpoint.has(f"{names[0]}_blocks") else _floats
    gate_up = of_names(part, names[0], own, order, cut.times(2), hidden, segments=1)
    down = of_names(part, names[1], own, order, hidden, cut, segments=segments)
    gate_up_bias = checkpoint.take(f"{prefix}gate_up_proj_bias", [own, cut.times(2)], dtype=torch.float32)
    down_bias = checkpoint.take(f"{prefix}down_proj_bias", [own, hidden], dtype=torch.float32)
    return BiasedExperts(
        gate_up,
        gate_up_bias[order],
        down,
        down_bias[order] if cut.taken.start == 0 else None,
        alpha=gate.alpha,
        limit=gate.limit,
        segments=segments,
    )


def _floats(
    part: ModelPart, name: str, experts: Cut, order: Sequence[int], rows: Cut, columns: Cut, *, segments: int
) -> list[Weight]:
    """[rows, columns] of each place in `order` of the `experts`."""
    stack = part.checkpoint.take(name, [experts, part.read_inputs(name, columns, segments), rows]).mT
    return [part.rounded(stack[place], columns) for place in order]


def _blocks(
    part: ModelPart, name: str, experts: Cut, order: Sequence[int], rows: Cut, columns: Cut, *, segments: int
) -> list[Weight]:
    """As `_floats`, of MXFP4; a block is read whole where a cut begins or ends in it, and then becomes floats."""
    checkpoint, first = part.checkpoint, columns.taken.start // BLOCK
    blocks = Cut(columns.total // BLOCK, range(first, -(-columns.taken.stop // BLOCK)))
    packed = checkpoint.take_bytes(f"{name}_blocks", [experts, rows, blocks, BLOCK // 2])
    scales = checkpoint.take_bytes(f"{name}_scales", [experts, rows, blocks])
    if kernel_on(checkpoint.device, checkpoint.dtype) is not None and len(columns) // segments % BLOCK == 0:
        return [mxfp4_codes(packed[place], scales[place], dtype=checkpoint.dtype) for place in order]
    begin = columns.taken.start - first * BLOCK
    values = mxfp4_values(packed, scales, dtype=checkpoint.dtype)[:, :, begin : begin + len(columns)]
    return [values[place].to(checkpoint.device) for place in order]
