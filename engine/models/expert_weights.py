"""Loads the experts of a layer and their router.

one matrix each    most families
two stacks         gate and up of all experts, and down: [experts, outputs, inputs], or in Qwen3-VL
                   [experts, inputs, outputs]. The shape decides, or the first, as in transformers
fused (gpt-oss)    inputs before outputs, or MXFP4 blocks, outputs first. Blocks stay packed where
                   our kernel multiplies them; floats may be quantized (`--quantization`)
"""

from collections.abc import Sequence

import torch

from engine.layers.biased_experts import BiasedExperts
from engine.layers.expert_router import ExpertRouter
from engine.layers.experts import Experts
from engine.layers.linear import kernel_on
from engine.model_files.experts_config import ClampedGate, ExpertNames, ExpertsConfig
from engine.models.part import ModelPart, in_one
from engine.parallel.layout import Cut, Extent
from engine.quant.integers import Weight
from engine.quant.mxfp4 import BLOCK, mxfp4_codes, mxfp4_values


def load_router(part: ModelPart, prefix: str, experts: ExpertsConfig, names: ExpertNames) -> ExpertRouter:
    checkpoint = part.checkpoint
    weight = checkpoint.take(f"{prefix}{names.router}.weight", [experts.count, part.config.hidden_size])
    bias = None
    if experts.clamped is not None:
        own = checkpoint.take(f"{prefix}{names.router}.bias", [experts.count])
        return ExpertRouter(weight, None, experts, logit_bias=own)
    if experts.sigmoid:
        name = names.choice_bias or f"{names.router}.e_score_correction_bias"
        bias = checkpoint.take(f"{prefix}{name}", [experts.count], dtype=torch.float32)
    return ExpertRouter(weight, bias, experts)


def load_experts(
    part: ModelPart,
    prefix: str,
    config: ExpertsConfig,
    names: ExpertNames,
    experts: Sequence[int],
    *,
    cut: Cut,
    segments: int,
) -> Experts | BiasedExperts:
    if config.clamped is not None:
        place = f"{prefix}{names.experts}."
        return _load_fused(part, place, config.clamped, experts, count=config.count, cut=cut, segments=segments)
    if names.stacks is not None and part.checkpoint.has(prefix + names.stacks[0]):
        first, last = (prefix + name for name in names.stacks)
        return Experts(*_load_stacks(part, (first, last), experts, cut=cut, segments=segments), segments=segments)
    hidden = part.config.hidden_size
    gate_up, down = [], []
    for index in experts:
        of_one = f"{prefix}{names.experts}.{index}."
        both = [f"{of_one}{name}.weight" for name in (names.gate, names.up)]
        gate_up.append(part.matrix(both, [cut, cut], hidden))
        down.append(part.matrix([f"{of_one}{names.down}.weight"], [hidden], cut, segments=segments))
    return Experts(gate_up, down, segments=segments)


def _load_stacks(
    part: ModelPart, names: tuple[str, str], experts: Sequence[int], *, cut: Cut, segments: int
) -> tuple[list[Weight], list[Weight]]:
    hidden, (both, down) = part.config.hidden_size, names
    stored = part.checkpoint.shape_of(both)
    if stored[1:] != [2 * cut.total, hidden] and stored[1:] == [hidden, 2 * cut.total]:
        return (
            [_transposed(part, f"{both}[{index}]", in_one([cut, cut]), hidden, segments=1) for index in experts],
            [_transposed(part, f"{down}[{index}]", [hidden], cut, segments=segments) for index in experts],
        )
    return (
        [part.matrix([f"{both}[{index}]"] * 2, in_one([cut, cut]), hidden) for index in experts],
        [part.matrix([f"{down}[{index}]"], [hidden], cut, segments=segments) for index in experts],
    )


def _transposed(part: ModelPart, name: str, rows: Sequence[Extent], inputs: Extent, *, segments: int) -> Weight:
    read = part.read_inputs(name, inputs, segments)
    parts = [part.checkpoint.take(name, [read, own]).mT for own in rows]
    return part.rounded(torch.cat(parts), inputs)


def _load_fused(
    part: ModelPart, prefix: str, gate: ClampedGate, experts: Sequence[int], *, count: int, cut: Cut, segments: int
) -> BiasedExperts:
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
    stack = part.checkpoint.take(name, [experts, part.read_inputs(name, columns, segments), rows]).mT
    return [part.rounded(stack[place], columns) for place in order]


def _blocks(
    part: ModelPart, name: str, experts: Cut, order: Sequence[int], rows: Cut, columns: Cut, *, segments: int
) -> list[Weight]:
    """Blocks cut in the middle become floats."""
    checkpoint, first = part.checkpoint, columns.taken.start // BLOCK
    blocks = Cut(columns.total // BLOCK, range(first, -(-columns.taken.stop // BLOCK)))
    packed = checkpoint.take_bytes(f"{name}_blocks", [experts, rows, blocks, BLOCK // 2])
    scales = checkpoint.take_bytes(f"{name}_scales", [experts, rows, blocks])
    if kernel_on(checkpoint.device, checkpoint.dtype) is not None and len(columns) // segments % BLOCK == 0:
        return [mxfp4_codes(packed[place], scales[place], dtype=checkpoint.dtype) for place in order]
    begin = columns.taken.start - first * BLOCK
    values = mxfp4_values(packed, scales, dtype=checkpoint.dtype)[:, :, begin : begin + len(columns)]
    return [values[place].to(checkpoint.device) for place in order]
