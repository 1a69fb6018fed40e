"""Loaded adapters on the device, and what a step adds to the layers' results. Runs in stream order."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from engine.core.plan import PlanItem, SlotOpen
from engine.layers.linear import Delta, LinearSite
from engine.lora.row_tiles import Run, adapter_runs
from engine.lora.weights import AdapterWeights, SiteWeights


class StepAdapters(Protocol):
    """Computes what adapters add. `delta(i)` does it for site i of a model, by the step begun last."""

    records: bool  # whether recorded steps may compute with adapters

    def add(self, number: int, weights: AdapterWeights) -> None: ...

    def remove(self, number: int) -> None: ...

    def begin(self, runs: Sequence[Run], *, recorded: int | None) -> None:
        """Prepare for a step. `recorded`: rows of the recorded step that computes it; None: it is launched anew."""

    def begin_recording(self, rows: int) -> None:
        """Compute from now on as a recorded step of `rows` rows does, until the next `begin`."""

    def compile(self) -> None:
        """Compile all kernels that a step may launch."""

    def delta(self, index: int) -> Delta: ...


class AdapterBank:
    """`steps`: how they are computed; SlicedAdapters anywhere, GroupedAdapters by Triton."""

    def __init__(self, steps: StepAdapters) -> None:
        self._steps = steps
        self._adapters: dict[int, AdapterWeights] = {}
        self._of_slot: dict[int, int] = {}  # slot -> adapter of the request that has it, or had it last
        self._runs: list[Run] = []  # of the step that was begun last

    def attach(self, sites: Sequence[LinearSite]) -> None:
        """Let the adapters change the results of `sites`; once for each model."""
        for index, site in enumerate(sites):
            site.linear.delta = self._steps.delta(index)
        self._steps.compile()
        self.rest()

    def add(self, number: int, weights: AdapterWeights) -> None:
        assert number > 0 and number not in self._adapters
        self._adapters[number] = weights
        self._steps.add(number, weights)

    def remove(self, number: int) -> AdapterWeights:
        """Return the weights to keep until the device is done with earlier steps."""
        self._steps.remove(number)
        return self._adapters.pop(number)

    def open(self, opened: SlotOpen) -> None:
        self._of_slot[opened.slot] = opened.adapter

    def begin(self, items: Iterable[PlanItem]) -> bool:
        """Note the step of `items`; return whether some token of it computes with an adapter."""
        self._runs = adapter_runs((self._of_slot[item.slot], item.q_len) for item in items)
        return bool(self._runs)

    def compute(self, *, recorded: int | None = None) -> None:
        """Prepare for the step begun last. `recorded`: rows of the recorded step; None: none."""
        self._steps.begin(self._runs, recorded=recorded)

    def rest(self) -> None:
        """Change no layer until the next step."""
        self._runs = []
        self.compute()

    @property
    def records(self) -> bool:
        """Whether recorded steps may compute with adapters."""
        return self._steps.records

    def begin_recording(self, rows: int) -> None:
        """Compute from now on as a recorded step of `rows` rows with adapters does, until `rest`."""
        self._steps.begin_recording(rows)


class SlicedAdapters:
    """Computes by torch's operators: two products for each adapter, site and slice of neighbouring rows."""

    records = False

    def __init__(self) -> None:
        self._adapters: dict[int, AdapterWeights] = {}
        self._active: list[tuple[slice, AdapterWeights]] = []  # tokens of this step, and what they compute with

    def add(self, number: int, weights: AdapterWeights) -> None:
        self._adapters[number] = weights

    def remove(self, number: int) -> None:
        self._active = []
        del self._adapters[number]

    def begin(self, runs: Sequence[Run], *, recorded: int | None) -> None:
        assert recorded is None or not runs, "a recorded step has no slices"
        self._active = [(run.rows, self._adapters[run.adapter]) for run in runs]

    def begin_recording(self, rows: int) -> None:
        raise AssertionError("a recorded step has no slices")

    def compile(self) -> None:
        """Torch's operators are compiled."""

    def delta(self, index: int) -> Delta:
        def delta(x: Tensor, y: Tensor) -> None:
            for rows, adapter in self._active:
                weights = adapter.sites[index]
                if weights is not None:
                    add_delta(weights, x[rows], y[rows])

        return delta


def add_delta(weights: SiteWeights, x: Tensor, y: Tensor) -> None:
    """Add the adapter's part for x [n, in] to y [n, out] in place, computed in y's type. Hu et al. 2021, "LoRA"."""
    low = x.to(y.dtype) @ weights.a.t().to(y.dtype)
    for columns, ranks, b in weights.parts:
        y[:, columns].addmm_(low[:, ranks], b.to(y.dtype))
