"""Loaded adapters on the device, and what a step adds to the layers' results. Runs in stream order."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from engine.core.plan import PlanItem, SlotOpen
from engine.layers.linear import Delta, LinearSite
from engine.lora.weights import AdapterWeights, SiteWeights


class AdapterBank:
    def __init__(self) -> None:
        self._adapters: dict[int, AdapterWeights] = {}
        self._of_slot: dict[int, int] = {}  # slot -> adapter of the request that has it, or had it last
        self._active: list[tuple[slice, AdapterWeights]] = []  # tokens of this step, and what they compute with

    def attach(self, sites: Sequence[LinearSite]) -> None:
        """Let the adapters change the results of `sites`; once for each model."""
        for index, site in enumerate(sites):
            site.linear.delta = self._delta(index)

    def add(self, number: int, weights: AdapterWeights) -> None:
        assert number > 0 and number not in self._adapters
        self._adapters[number] = weights

    def remove(self, number: int) -> AdapterWeights:
        """Return the weights to keep until the device is done with earlier steps."""
        self._active = []
        return self._adapters.pop(number)

    def open(self, opened: SlotOpen) -> None:
        self._of_slot[opened.slot] = opened.adapter

    def begin(self, items: Iterable[PlanItem]) -> None:
        """Prepare for the step of `items`."""
        runs = adapter_runs((self._of_slot[item.slot], item.q_len) for item in items)
        self._active = [(run.rows, self._adapters[run.adapter]) for run in runs]

    @property
    def active(self) -> bool:
        """Whether some token of this step computes with an adapter."""
        return bool(self._active)

    def _delta(self, index: int) -> Delta:
        def delta(x: Tensor, y: Tensor) -> None:
            for rows, adapter in self._active:
                weights = adapter.sites[index]
                if weights is not None:
                    add_delta(weights, x[rows], y[rows])

        return delta


def add_delta(weights: SiteWeights, x: Tensor, y: Tensor) -> None:
    """Add the adapter's part for x [n, in] to y [n, out] in place. Hu et al. 2021, "LoRA"."""
    low = x @ weights.a.t()
    for columns, ranks, b in weights.parts:
        y[:, columns].addmm_(low[:, ranks], b)


class Run(NamedTuple):
    """Successive tokens `rows` of a step that compute with `adapter`."""

    adapter: int
    rows: slice


def adapter_runs(items: Iterable[tuple[int, int]]) -> list[Run]:
    """Join the neighbours of one adapter among `items`, (adapter, tokens) each; adapter 0 has no run."""
    runs: list[Run] = []
    at = 0
    for adapter, count in items:
        start, at = at, at + count
        if adapter and runs and runs[-1].adapter == adapter and runs[-1].rows.stop == start:
            runs[-1] = Run(adapter, slice(runs[-1].rows.start, at))
        elif adapter:
            runs.append(Run(adapter, slice(start, at)))
    return runs
