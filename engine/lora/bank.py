"""Loaded adapters on the device, and their contribution to layers. Runs in stream order."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.core.plan import PlanItem, SlotOpen
from engine.layers.linear import Delta, LinearSite, SiteShape
from engine.lora.weights import AdapterWeights, SiteWeights, read_adapter
from service.flags import ConfigError
from service.waiter import start_in_thread

# ---- Rows of a step by adapter, as tiles for grouped kernels. Pure.

NO_TILE = (0, 0, 0, 0)


class Run(NamedTuple):
    """Consecutive `rows` of a step with `adapter`."""

    adapter: int
    rows: slice


def adapter_runs(items: Iterable[tuple[int, int]]) -> list[Run]:
    """Merge neighbouring (adapter, tokens); skip adapter 0."""
    runs: list[Run] = []
    at = 0
    for adapter, count in items:
        start, at = at, at + count
        if adapter and runs and runs[-1].adapter == adapter and runs[-1].rows.stop == start:
            runs[-1] = Run(adapter, slice(runs[-1].rows.start, at))
        elif adapter:
            runs.append(Run(adapter, slice(start, at)))
    return runs


class RowTiles(NamedTuple):
    """Rows, by adapter, in `tiles`: (place, first index in `rows`, count, 0) each."""

    rows: list[int]
    tiles: list[tuple[int, int, int, int]]


def row_tiles(runs: Iterable[tuple[int, slice]], *, tile_rows: int) -> RowTiles:
    """Group (place, rows of the step) into tiles of at most `tile_rows` of one place."""
    by_place: dict[int, list[int]] = {}
    for place, rows in runs:
        by_place.setdefault(place, []).extend(range(rows.start, rows.stop))
    grouped, tiles = list[int](), list[tuple[int, int, int, int]]()
    for place, of_place in sorted(by_place.items()):
        for at in range(0, len(of_place), tile_rows):
            tiles.append((place, len(grouped) + at, min(tile_rows, len(of_place) - at), 0))
        grouped += of_place
    return RowTiles(grouped, tiles)


def max_tiles(num_rows: int, *, places: int, tile_rows: int) -> int:
    return num_rows // tile_rows + min(places, num_rows)


class StepAdapters(Protocol):
    """`delta(i)`: for site i of a model, by the last step that began."""

    records: bool  # whether recorded steps may compute with adapters

    def add(self, number: int, weights: AdapterWeights) -> None: ...

    def remove(self, number: int) -> None: ...

    def begin(self, runs: Sequence[Run], *, recorded: int | None) -> None:
        """Prepare a step. `recorded`: rows of the recorded step that runs it, None if launched."""

    def begin_recording(self, rows: int) -> None:
        """Compute as a recorded step of `rows` rows until the next `begin`."""

    def compile(self) -> None: ...

    def delta(self, index: int) -> Delta: ...


class AdapterBank:
    """`steps`: how they are computed; SlicedAdapters anywhere, GroupedAdapters by Triton."""

    def __init__(self, steps: StepAdapters) -> None:
        self._steps = steps
        self._adapters: dict[int, AdapterWeights] = {}
        self._of_slot: dict[int, int] = {}  # slot -> adapter of the request that has it, or had it last
        self._runs: list[Run] = []  # of the step that was begun last

    def attach(self, sites: Sequence[LinearSite]) -> None:
        """Once for each model."""
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
        """Note the step of `items`; return whether any token has an adapter."""
        self._runs = adapter_runs((self._of_slot[item.slot], item.q_len) for item in items)
        return bool(self._runs)

    def compute(self, *, recorded: int | None = None) -> None:
        """For the step begun last; `recorded`: rows of its recorded step; None: none."""
        self._steps.begin(self._runs, recorded=recorded)

    def rest(self) -> None:
        self._runs = []
        self.compute()

    @property
    def records(self) -> bool:
        return self._steps.records

    def begin_recording(self, rows: int) -> None:
        self._steps.begin_recording(rows)


class SlicedAdapters:
    """Adapters by torch's operators: two products for each adapter, site and slice of rows."""

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

    def compile(self) -> None: ...

    def delta(self, index: int) -> Delta:
        def delta(x: Tensor, y: Tensor) -> None:
            for rows, adapter in self._active:
                weights = adapter.sites[index]
                if weights is not None:
                    add_delta(weights, x[rows], y[rows])

        return delta


def add_delta(weights: SiteWeights, x: Tensor, y: Tensor) -> None:
    """Add the adapter's part for x [n, in] to y [n, out] in y's type. Hu et al. 2021, "LoRA"."""
    low = x.to(y.dtype) @ weights.a.t().to(y.dtype)
    for columns, ranks, b in weights.parts:
        y[:, columns].addmm_(low[:, ranks], b.to(y.dtype))


# ---- Chooses the LoRA implementation.


def make_bank(
    sites: Sequence[SiteShape],
    *,
    grouped: bool,
    places: int,
    max_rank: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> AdapterBank:
    """`grouped`: Triton, also in recorded steps; needs `max_rank`. `places`: adapters per step."""
    if not grouped:
        return AdapterBank(SlicedAdapters())
    from engine.lora.grouped import GroupedAdapters  # triton may be missing

    assert max_rank is not None, "resolved"
    return AdapterBank(GroupedAdapters(sites, places=places, max_rank=max_rank, dtype=dtype, device=device))


@dataclass(eq=False, kw_only=True)
class LoraStore:
    """`in_order` runs work in stream order and waits. `elsewhere`: sites of other stages.

    engine/core/adapters.py tracks their requests.
    """

    bank: AdapterBank
    sites: Sequence[SiteShape]
    elsewhere: Sequence[SiteShape] = ()
    dtype: torch.dtype
    device: torch.device
    max_rank: int | None
    in_order: Callable[[Callable[[], object]], object]

    def start_reading(self, path: str, *, when_done: Callable[[], None]) -> Future[AdapterWeights]:
        """The thread calls `when_done`. The future may raise ConfigError."""
        return start_in_thread(lambda: self.read(path), name="lora", when_done=when_done)

    def read(self, path: str) -> AdapterWeights:
        """Raises ConfigError."""
        try:
            weights = read_adapter(
                path,
                self.sites,
                dtype=self.dtype,
                device=self.device,
                max_rank=self.max_rank,
                elsewhere=self.elsewhere,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"{path}: no memory for another adapter ({error}); unload one") from error
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # this thread's stream copies them
        return weights

    def install(self, number: int, weights: AdapterWeights) -> str:
        self.in_order(lambda: self.bank.add(number, weights))
        return weights.digest

    def remove(self, number: int) -> None:
        """Memory is freed after earlier steps."""
        self.in_order(lambda: self.bank.remove(number))
