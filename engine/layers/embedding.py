"""Token embedding, perhaps divided over ranks."""

import torch

from engine.layers.linear import summed
from engine.parallel.collectives import Collectives


class Embedding:
    """Token vectors. `table` [len(own), hidden]: rows `own` of the vocabulary."""

    def __init__(self, table: torch.Tensor, *, own: range, collectives: Collectives | None = None) -> None:
        assert len(table) == len(own), (table.shape, own)
        self._table = table
        self._own = own
        self._collectives = collectives

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._collectives is None:
            return self._table.index_select(0, ids)
        rows = ids - self._own.start
        clamped = rows.clamp(0, len(self._own) - 1)
        # -0.0 + x is x for every x, also -0.0 and 0.0: the sum over ranks equals the one row to the
        # bit
        absent = torch.full((), -0.0, device=ids.device)
        partial = torch.where((rows == clamped)[:, None], self._table.index_select(0, clamped).float(), absent)
        return summed(self._collectives, partial, dtype=self._table.dtype)
