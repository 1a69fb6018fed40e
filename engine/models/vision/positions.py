"""Where patches are in their frame: as a turn of q and k, or as vectors that are added."""

import torch
from torch import Tensor

from engine.layers.rope import Turn


class AxialRope:
    """Half of a head's pairs turn by the row, half by the column, in fp32 (Qwen2-VL, arXiv:2409.12191)."""

    def __init__(self, head_dim: int, *, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self._frequencies = (1.0 / theta**exponents).to(device)

    def at(self, rows: Tensor, columns: Tensor) -> Turn:
        """(cos, signed sin), each [patches, 1, head_dim], for `rows` and `columns` [patches] i64."""
        places = torch.stack((rows, columns), 1).to(self._frequencies.device).float()
        angles = (places.unsqueeze(-1) * self._frequencies).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)


class LearnedPositions:
    """`table` [side * side, hidden], spread over a frame of any size: bilinear, the corners of both on one another (Qwen3-VL)."""

    def __init__(self, table: Tensor, *, side: int) -> None:
        self._table, self._side = table, side

    def at(self, rows: Tensor, columns: Tensor, *, size: tuple[int, int]) -> Tensor:
        """[patches, hidden] for `rows` and `columns` [patches] i64 of a frame of `size`."""
        total = torch.zeros(len(rows), self._table.shape[1], device=self._table.device)
        for row, row_weight in self._taps(rows, size[0]):
            for column, weight in self._taps(columns, size[1]):
                index = (row * self._side + column).to(self._table.device)
                weights = (row_weight * weight).unsqueeze(1).to(self._table.device)
                total.addcmul_(self._table.index_select(0, index).float(), weights)
        return total.to(self._table.dtype)

    def _taps(self, places: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """The two numbers in the table beside each of `places`, and their weights."""
        at = places.float() * (self._side - 1) / max(size - 1, 1)
        first = at.floor().long()
        part = at - first
        return [(first, 1 - part), ((first + 1).clamp(max=self._side - 1), part)]
