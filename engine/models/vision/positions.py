"""Patch positions in a frame, as RoPE or added vectors."""

import torch
from torch import Tensor

from engine.layers.rope import Turn


class AxialRope:
    """2D RoPE in fp32: half of the pairs by row, half by column (Qwen2-VL, arXiv:2409.12191)."""

    def __init__(self, head_dim: int, *, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self._frequencies = (1.0 / theta**exponents).to(device)

    def at(self, rows: Tensor, columns: Tensor) -> Turn:
        """(cos, signed sin), each [patches, 1, head_dim]; `rows`, `columns` [patches] i64."""
        places = torch.stack((rows, columns), 1).to(self._frequencies.device).float()
        angles = (places.unsqueeze(-1) * self._frequencies).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)


class LearnedPositions:
    """Position vectors from `table` [side * side, hidden].

    They are bilinearly interpolated with aligned corners (Qwen3-VL).
    """

    def __init__(self, table: Tensor, *, side: int) -> None:
        self._table, self._side = table, side

    def at(self, rows: Tensor, columns: Tensor, *, size: tuple[int, int]) -> Tensor:
        total = torch.zeros(len(rows), self._table.shape[1], device=self._table.device)
        for row, row_weight in self._taps(rows, size[0]):
            for column, weight in self._taps(columns, size[1]):
                index = (row * self._side + column).to(self._table.device)
                weights = (row_weight * weight).unsqueeze(1).to(self._table.device)
                total.addcmul_(self._table.index_select(0, index).float(), weights)
        return total.to(self._table.dtype)

    def _taps(self, places: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        at = places.float() * (self._side - 1) / max(size - 1, 1)
        first = at.floor().long()
        part = at - first
        return [(first, 1 - part), ((first + 1).clamp(max=self._side - 1), part)]
