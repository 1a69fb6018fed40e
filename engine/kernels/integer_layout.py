"""Layout of integer weights for linear.c (tiles/integer_steps.h)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.quant.integers import Integers

TILE, STEP, PANEL = 16, 32, 32  # outputs of a tile, inputs of a step, outputs of a panel
PAIR = 2 * PANEL  # outputs of two adjacent panels
PAIRS_AT_ONCE = 32  # rearranged at a time: copies stay small
FACTOR_BYTES = 4  # fp32


def step_bytes(bits: int) -> int:
    return STEP * PANEL * bits // 8


def fits(weight: Integers, *, segments: int) -> bool:
    size = weight.shape[1] // segments
    return weight.scales.shape[1] == 1 or (weight.group % STEP == 0 and (segments == 1 or size % weight.group == 0))


def group_steps(weight: Integers, *, segments: int) -> int:
    size = weight.shape[1] // segments
    return -(-min(size, weight.group) // STEP)


def packed_bytes(weight: Integers, *, segments: int, offsets: bool) -> int:
    outputs, inputs = weight.shape
    steps = -(-(inputs // segments) // STEP)
    groups = -(-steps // group_steps(weight, segments=segments))
    factors = (2 if offsets else 1) * PANEL * FACTOR_BYTES
    return -(-outputs // PANEL) * segments * (steps * step_bytes(weight.bits) + groups * factors)


def packed_parts(weight: Integers, *, segments: int, gates: bool, offsets: bool) -> Iterator[Tensor]:
    rows = _panel_rows(len(weight), gates=gates)
    end = len(rows) // PAIR * PAIR
    for at in range(0, end, PAIRS_AT_ONCE * PAIR):
        own = rows[at : min(at + PAIRS_AT_ONCE * PAIR, end)]
        yield _packed(weight, own, 2, segments=segments, offsets=offsets)
    if end < len(rows):
        yield _packed(weight, rows[end:], 1, segments=segments, offsets=offsets)


def _packed(weight: Integers, rows: Tensor, panels: int, *, segments: int, offsets: bool) -> Tensor:
    each, runs = group_steps(weight, segments=segments), len(rows) // (panels * PANEL)
    steps = _steps(weight, rows, segments).view(runs, panels, segments, -1, step_bytes(weight.bits))
    steps = steps.permute(0, 2, 3, 1, 4).flatten(3)  # [runs, segments, steps, bytes]
    given = [weight.scales]
    if offsets:
        given.append(torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets)
    factors = [_factors(of_groups, rows, segments).unflatten(0, (runs, -1)) for of_groups in given]
    parts: list[Tensor] = []
    for group, own in enumerate(steps.split(each, dim=2)):
        parts.append(own.flatten(2))
        parts += [
            of_groups[:, :, :, group].transpose(1, 2).contiguous().view(torch.uint8).flatten(2) for of_groups in factors
        ]
    return torch.cat(parts, dim=2).view(-1)


def _steps(weight: Integers, rows: Tensor, segments: int) -> Tensor:
    values = _rows(weight.values, rows).view(len(rows), segments, weight.shape[1] // segments)
    values = functional.pad(values, (0, -values.shape[2] % STEP))
    tiles = values.reshape(len(rows) // PANEL, 2, TILE, -1, TILE, 2)
    lines = tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, STEP)  # 16 outputs, two inputs each
    return (_nibbles(lines) if weight.bits == 4 else _bytes(lines)).contiguous().view(torch.uint8)


def _factors(of_groups: Tensor, rows: Tensor, segments: int) -> Tensor:
    if of_groups.shape[1] == 1:
        of_groups = of_groups.expand(-1, segments)
    return _rows(of_groups, rows).view(len(rows), segments, -1)


def _panel_rows(outputs: int, *, gates: bool) -> Tensor:
    if gates:
        return torch.arange(outputs).view(2, -1, TILE).transpose(0, 1).reshape(-1)
    rows = torch.full((-(-outputs // PANEL) * PANEL,), -1)
    rows[:outputs] = torch.arange(outputs)
    return rows


def _rows(matrix: Tensor, rows: Tensor) -> Tensor:
    there = matrix.index_select(0, rows.clamp(min=0))
    return there.masked_fill_((rows < 0)[:, None], 0)


def _nibbles(lines: Tensor) -> Tensor:
    """Pack four lines into each int16 word, offset by 8: [n / 4, 32]."""
    four = (lines + 8).to(torch.int16).view(-1, 4, STEP)
    return four[:, 0] | four[:, 1] << 4 | four[:, 2] << 8 | four[:, 3] << 12


def _bytes(lines: Tensor) -> Tensor:
    """Interleave 8 integers each of two lines: [n / 2, 4, 2, 8]."""
    return lines.view(-1, 2, 4, 8).transpose(1, 2)
