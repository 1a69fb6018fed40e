"""Loaded adapters on the device, and what a step adds to the layers' results. Runs inside the stream, in plan order.

Each `Linear` of an attached model calls its site's delta, which changes only tokens that compute with an adapter.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from engine.core.plan import PlanItem, SlotOpen
from engine.layers.linear import Delta, LinearSite
from engine.lora.segments import adapter_runs
from engine.lora.weights import AdapterWeights, SiteWeights


class AdapterBank:
    def __init__(self) -> None:
        self._adapters: dict[int, AdapterWeights] = {}
        self._of_slot: dict[int, int] = {}  # slot -> adapter of the request that has it, or had it last
        self._active: list[tuple[slice, AdapterWeights]] = []  # tokens of this step, and what they compute with

    def attach(self, sites: Sequence[LinearSite]) -> None:
        """Let the adapters change the results of `sites` from now on; once for each model."""
        for index, site in enumerate(sites):
            site.linear.delta = self._delta(index)

    def add(self, number: int, weights: AdapterWeights) -> None:
        """In stream order (`Executor.call`)."""
        assert number > 0 and number not in self._adapters
        self._adapters[number] = weights

    def remove(self, number: int) -> AdapterWeights:
        """In stream order; keep what is returned until the device is done with the steps before."""
        self._active = []
        return self._adapters.pop(number)

    def open(self, opened: SlotOpen) -> None:
        """Compute the slot's tokens with this adapter from now on."""
        self._of_slot[opened.slot] = opened.adapter

    def begin(self, items: Iterable[PlanItem]) -> None:
        """The step that comes computes `items`, one after another in its tokens."""
        runs = adapter_runs((self._of_slot[item.slot], item.q_len) for item in items)
        self._active = [(run.rows, self._adapters[run.adapter]) for run in runs]

    @property
    def active(self) -> bool:
        """Some token of the step at hand computes with an adapter."""
        return bool(self._active)

    def _delta(self, index: int) -> Delta:
        def delta(x: Tensor, y: Tensor) -> None:
            for rows, adapter in self._active:
                weights = adapter.sites[index]
                if weights is not None:
                    add_delta(weights, x[rows], y[rows])

        return delta


def add_delta(weights: SiteWeights, x: Tensor, y: Tensor) -> None:
    """y [n, out] += what `weights` make of x [n, in], in place. Hu et al. 2021, "LoRA"."""
    low = x @ weights.a.t()
    for columns, ranks, b in weights.parts:
        y[:, columns].addmm_(low[:, ranks], b)
