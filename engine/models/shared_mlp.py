"""The MLP of a layer that all DP ranks compute together (DP attention): each rank has a part of it, and computes it for all rows."""

import torch

from engine.layers.gates import GATES
from engine.layers.linear import LinearSite, sums_matrix
from engine.layers.norm import Normed
from engine.models.part import ModelPart
from engine.parallel.row_exchange import RowExchange, RowStages


class SharedMLP:
    """As `FeedForward`. It has no sites for adapters: a row's adapter is known to its own DP rank alone."""

    def __init__(self, part: ModelPart, prefix: str, *, exchange: RowExchange) -> None:
        self._gate_up, _ = part.gate_up(prefix)
        cut, segments = part.mlp_cut(part.config.intermediate_size), part.mlp_segments
        name, factors = f"{prefix}{part.mlp_names.down}", [part.config.arithmetic.down_factor]
        down = part.matrix([f"{name}.weight"], [part.config.hidden_size], cut, segments=segments, factors=factors)
        bias = part.vector(f"{name}.bias") if part.mlp_names.bias else None
        self._down = sums_matrix(down, bias if cut.taken.start == 0 else None, segments=segments)
        self._gate = GATES[part.config.arithmetic.activation]
        self._exchange = exchange
        self._no_rows = part.no_rows()
        self.sites: list[LinearSite] = []

    def stages(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> RowStages[torch.Tensor]:
        """The MLP of norm(x + delta), which x becomes before the norm."""
        return self._exchange.compute(norm.of_sum(x, delta), self._partial)

    def join(self) -> RowStages[torch.Tensor]:
        """Compute this rank's part for the rows of the others, without rows of its own."""
        return self._exchange.compute(self._no_rows, self._partial)

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        return self._down.partial(self._gate(self._gate_up(x)))
