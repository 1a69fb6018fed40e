"""Integer weights in the order in which linear.c reads them (integer_steps.h)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.quant.integers import Integers

TILE, STEP, PANEL = 16, 32, 32  # outputs of a tile, inputs of a step, outputs of a panel
PANELS_AT_ONCE = 64  # rearranged at a time: copies stay small


def step_bytes(bits: int) -> int:
    return STEP * PANEL * bits // 8


def fits(weight: Integers, *, segments: int) -> bool:
    """Whether groups are whole steps, and of one segment each."""
    size = weight.shape[1] // segments
    return weight.scales.shape[1] == 1 or (weight.group % STEP == 0 and (segments == 1 or size % weight.group == 0))


def group_steps(weight: Integers, *, segments: int) -> int:
    """Steps of a group, within a segment."""
    size = weight.shape[1] // segments
    return -(-min(size, weight.group) // STEP)


def packed_steps(weight: Integers, *, segments: int, gates: bool) -> Iterator[Tensor]:
    """The packed integers, uint8, some panels after the other."""
    outputs, inputs = weight.shape
    size = inputs // segments
    for panels in _panel_rows(outputs, gates=gates).split(PANELS_AT_ONCE * PANEL):
        values = _rows(weight.values, panels).view(len(panels), segments, size)
        values = functional.pad(values, (0, -size % STEP))
        tiles = values.reshape(len(panels) // PANEL, 2, TILE, -1, TILE, 2)
        lines = tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, STEP)  # of 16 outputs, two inputs each
        yield (_nibbles(lines) if weight.bits == 4 else _bytes(lines)).contiguous().view(torch.uint8).view(-1)


def packed_groups(of_groups: Tensor, weight: Integers, *, segments: int, gates: bool) -> Tensor:
    """[panels, groups of all segments, 32] of `of_groups` [out, groups]."""
    rows = _panel_rows(len(of_groups), gates=gates)
    if of_groups.shape[1] == 1:
        of_groups = of_groups.expand(-1, segments)
    return _rows(of_groups, rows).view(len(rows) // PANEL, PANEL, -1).transpose(1, 2).contiguous()


def _panel_rows(outputs: int, *, gates: bool) -> Tensor:
    """The output in each place of the panels; -1 behind the last."""
    if gates:
        return torch.arange(outputs).view(2, -1, TILE).transpose(0, 1).reshape(-1)
    rows = torch.full((-(-outputs // PANEL) * PANEL,), -1)
    rows[:outputs] = torch.arange(outputs)
    return rows


def _rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """The `rows` of it, zeros for -1."""
    there = matrix.index_select(0, rows.clamp(min=0))
    return there.masked_fill_((rows < 0)[:, None], 0)


def _nibbles(lines: Tensor) -> Tensor:
    """[n / 4, 32] int16: four lines in each word, above 8."""
    four = (lines + 8).to(torch.int16).view(-1, 4, STEP)
    return four[:, 0] | four[:, 1] << 4 | four[:, 2] << 8 | four[:, 3] << 12


def _bytes(lines: Tensor) -> Tensor:
    """[n / 2, 4, 2, 8]: 8 integers of a line, 8 of the next."""
    return lines.view(-1, 2, 4, 8).transpose(1, 2)
