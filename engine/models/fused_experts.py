"""Experts that a checkpoint keeps in one tensor a layer (gpt-oss): inputs before outputs, or in blocks of MXFP4, outputs first."""

from collections.abc import Sequence

import torch

from engine.layers.biased_experts import BiasedExperts
from engine.model_files.experts_config import ClampedGate
from engine.models.part import ModelPart
from engine.parallel.layout import Cut
from engine.quant.mxfp4 import BLOCK, mxfp4_values


def load_fused_experts(
    part: ModelPart, prefix: str, gate: ClampedGate, experts: Sequence[int], *, count: int, cut: Cut, segments: int
) -> BiasedExperts:
    """The products of `experts`, in any order, of `count`, of whose intermediate this rank has `cut`. `prefix`: of the experts."""
    hidden, checkpoint = part.config.hidden_size, part.checkpoint
    own = Cut(count, range(min(experts), max(experts) + 1))
    order = [expert - own.taken.start for expert in experts]
    names = f"{prefix}gate_up_proj", f"{prefix}down_proj"
    if checkpoint.has(f"{names[0]}_blocks"):
        gate_up, down = (
            _blocks(part, names[0], own, cut.times(2), Cut.whole(hidden)),
            _blocks(part, names[1], own, Cut.whole(hidden), cut),
        )
    else:
        gate_up = checkpoint.take(names[0], [own, hidden, cut.times(2)]).mT
        down = checkpoint.take(names[1], [own, cut, hidden]).mT
    gate_up_bias = checkpoint.take(f"{prefix}gate_up_proj_bias", [own, cut.times(2)], dtype=torch.float32)
    down_bias = checkpoint.take(f"{prefix}down_proj_bias", [own, hidden], dtype=torch.float32)
    return BiasedExperts(
        [gate_up[place] for place in order],
        gate_up_bias[order],
        [down[place] for place in order],
        down_bias[order] if cut.taken.start == 0 else None,
        alpha=gate.alpha,
        limit=gate.limit,
        segments=segments,
    )


def _blocks(part: ModelPart, name: str, experts: Cut, rows: Cut, columns: Cut) -> torch.Tensor:
    """[experts, rows, columns] of a tensor of MXFP4 blocks, in the model's type; a block is read whole where a cut begins or ends in it."""
    checkpoint, first = part.checkpoint, columns.taken.start // BLOCK
    blocks = Cut(columns.total // BLOCK, range(first, -(-columns.taken.stop // BLOCK)))
    packed = checkpoint.take_bytes(f"{name}_blocks", [experts, rows, blocks, BLOCK // 2])
    scales = checkpoint.take_bytes(f"{name}_scales", [experts, rows, blocks])
    values = mxfp4_values(packed, scales, dtype=checkpoint.dtype)
    begin = columns.taken.start - first * BLOCK
    return values[:, :, begin : begin + len(columns)].to(checkpoint.device)
