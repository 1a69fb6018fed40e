"""Loaded adapters on the device, and what a step adds to the layers' results. Runs inside the stream, in plan order.

Each `Linear` of an attached model asks its site for the delta; tokens of the model alone are not touched, and in a step
without adapters nothing is done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.executor.upload import upload
from engine.layers.linear import Delta, LinearSite
from engine.lora.segments import Runs, runs_by_adapter
from engine.lora.weights import AdapterWeights, SiteWeights


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokens of one adapter: a slice of the step's where they lie together, else their indices [n] i64."""

    rows: slice | Tensor
    weights: AdapterWeights


class AdapterBank:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._adapters: dict[int, AdapterWeights] = {}
        self._segments: list[_Segment] = []

    def attach(self, sites: Sequence[LinearSite]) -> None:
        """From now on the results of `sites` are what the adapters make of them; once for each model."""
        for index, site in enumerate(sites):
            site.linear.delta = self._delta(index)

    def add(self, number: int, weights: AdapterWeights) -> None:
        """In stream order (`Executor.call`)."""
        assert number > 0 and number not in self._adapters
        self._adapters[number] = weights

    def remove(self, number: int) -> AdapterWeights:
        """In stream order; keep what is returned until the device is done with the steps before."""
        self._segments = []
        return self._adapters.pop(number)

    def begin(self, items: Iterable[PlanItem]) -> None:
        """The step that comes computes `items`, one after another in its tokens."""
        runs = runs_by_adapter((item.adapter, item.q_len) for item in items)
        self._segments = [_Segment(self._rows(r), self._adapters[number]) for number, r in runs.items()]

    def _rows(self, runs: Runs) -> slice | Tensor:
        if len(runs) == 1:
            return slice(*runs[0])
        return upload(torch.tensor([i for start, end in runs for i in range(start, end)]), self._device)

    def _delta(self, index: int) -> Delta:
        def delta(x: Tensor, y: Tensor) -> None:
            for segment in self._segments:
                weights = segment.weights.sites[index]
                if weights is not None:
                    add_delta(weights, x, y, segment.rows)

        return delta


def add_delta(weights: SiteWeights, x: Tensor, y: Tensor, rows: slice | Tensor) -> None:
    """y [T, out] += what `weights` make of x [T, in], at `rows` only. Hu et al. 2021, "LoRA"."""
    if isinstance(rows, slice):
        low, out = x[rows] @ weights.a.t(), y[rows]
        for columns, ranks, b in weights.parts:
            out[:, columns].addmm_(low[:, ranks], b)
        return
    low = x.index_select(0, rows) @ weights.a.t()
    for columns, ranks, b in weights.parts:
        y[:, columns].index_add_(0, rows, low[:, ranks] @ b)
