"""Experts that a checkpoint keeps in two tensors of a layer: gate and up of all of them, and down.

[experts, outputs, inputs], or in files of Qwen3-VL [experts, inputs, outputs]: the shape says which. Where both fit it is the first, as
transformers takes them.
"""

from collections.abc import Sequence

import torch

from engine.models.part import ModelPart, in_one
from engine.parallel.layout import Cut, Extent
from engine.quant.integers import Weight


def load_stacks(
    part: ModelPart, names: tuple[str, str], experts: Sequence[int], *, cut: Cut, segments: int
) -> tuple[list[Weight], list[Weight]]:
    """(gate and up, down) of `experts`, of whose intermediate this rank has `cut`. `names`: of the tensors."""
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
    """The matrix [rows above one another, inputs] of what is stored as [inputs, all rows]."""
    read = part.read_inputs(name, inputs, segments)
    parts = [part.checkpoint.take(name, [read, own]).mT for own in rows]
    return part.rounded(torch.cat(parts), inputs)
