"""Step data for attention kernels: lengths, page tables, destinations of new tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from engine.core.plan import PlanItem


@dataclass(slots=True)
class WindowRows:
    """A step's tables of the window pool; rows have stale pages before the window."""

    page_table: torch.Tensor
    token_pages: torch.Tensor


@dataclass(slots=True)
class TreePaths:
    """Places of visible newest tokens for rows of draft trees, where other nodes interleave.

    - starts: int32[B]: earlier positions are in order; kv_len for a row without a tree
    - places: int32[B, D]: position starts[b] + j is stored at position places[b, j]; 0 is unused
    """

    starts: torch.Tensor
    places: torch.Tensor

    def of(self, rows: torch.Tensor) -> "TreePaths":
        return TreePaths(self.starts[rows], self.places[rows])

    def end(self) -> int:
        """Exclusive maximum place; waits for the device."""
        return int(self.places.max()) + 1


@dataclass(slots=True)
class StepBatch:
    """One step of B requests with T new tokens in order, on the pool's device.

    - extend: any q_len; else all are 1 (decode) and T == B
    - q_lens: [B] new tokens; kv_lens: [B] cached tokens after this step
    - page_table: int32[slots, max_pages]: page ids of each slot's request, then padding
    - slots: int64[B]; token_pages, token_offsets: int64[T]: destinations
    - riders: decodes in an extend step; None if any request of one token may be one
    - state_slots: [B] on the host (engine/kv/state_pool.py); windows: tables of a window pool
    - drafted: single-token entries that read a draft of the entry before; paths: in trees
    """

    extend: bool
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: torch.Tensor
    slots: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    riders: Sequence[int] | None = None
    state_slots: Sequence[int] | None = None
    windows: WindowRows | None = None
    drafted: frozenset[int] = frozenset()
    paths: TreePaths | None = None

    @property
    def drafts(self) -> bool:
        return bool(self.drafted)

    def first_rows(self) -> list[int]:
        """First entry (row, for single tokens) of each request, and the end."""
        return [i for i in range(len(self.q_lens) + 1) if i not in self.drafted]

    def spans(self) -> list[tuple[int, int]]:
        ends = list(accumulate(self.q_lens))
        return [(end - n, end) for end, n in zip(ends, self.q_lens, strict=True)]

    def page_rows(self, page_size: int) -> torch.Tensor:
        """Copy page ids, int32[B, pages of the longest request]."""
        end = max(self.kv_lens) if self.paths is None else max(*self.kv_lens, self.paths.end())
        return self.page_table[self.slots, : -(-end // page_size)]


@dataclass(slots=True)
class DeviceStep:
    """Decode step with lengths int32[B] only on the device, for captured graphs.

    state_rows: [3, B]: first row, end and state slot of requests; padding is empty. `windows`: as
    of StepBatch.
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    paths: TreePaths | None = None
    state_rows: torch.Tensor | None = None
    windows: WindowRows | None = None


@dataclass(slots=True)
class DeviceExtend:
    """DeviceStep for any q_len, even 0; starts int32[B + 1] are first rows.

    Extra token_pages are padding.
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    kv_lens: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    windows: WindowRows | None = None


# ---- Asynchronous host to device copies.


def upload(values: torch.Tensor | Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy in stream order through pinned memory; pageable memory would stall the host."""
    x = torch.as_tensor(values)
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, on CUDA pinned and valid after the stream's next event."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def upload_into(target: torch.Tensor, x: torch.Tensor) -> None:
    if target.device.type == "cpu":
        target.copy_(x)
    else:
        target.copy_(x.pin_memory(), non_blocking=True)


# ---- Device rows slot -> page ids, written by plans in stream order.


class PageTable:
    """`rows`: [num_slots + 1, max_pages] int32, padded with old pages: readers go by kv_len.

    No request has the last row (`scratch_slot`), which is page 0 throughout.
    """

    def __init__(self, *, num_slots: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.rows = torch.zeros((num_slots + 1, max_pages), dtype=torch.int32, device=device)
        self.scratch_slot = num_slots
        self.page_size = page_size
        self.device = device

    def update(self, items: list[PlanItem]) -> None:
        """Append each item's new pages to its row, in one scatter."""
        self._append(self.rows, ((item.slot, item.page_start, item.new_pages) for item in items))

    def _append(self, table: Tensor, new: Iterable[tuple[int, int, list[int]]]) -> None:
        """`new`: (row, column, pages from there on)."""
        rows: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for row, start, ids in new:
            n = len(ids)
            rows += [row] * n
            columns += range(start, start + n)
            pages += ids
        if pages:
            at = upload([rows, columns, pages], self.device)
            table[at[0], at[1]] = at[2].to(torch.int32)

    def locate(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The (pages, offsets) of positions of the slots' requests, all [T] int64."""
        column = positions // self.page_size
        return self.rows[slots, column].to(torch.int64), positions - column * self.page_size

    def window_rows(self, slots: Tensor, positions: Tensor) -> WindowRows | None:
        """Tables of a window pool; `locate` gives the offsets."""
        return None


class WindowedPageTable(PageTable):
    """Page table of layers that see all; `windows`: of layers with a pool apart."""

    def __init__(self, *, num_slots: int, max_pages: int, page_size: int, device: torch.device) -> None:
        super().__init__(num_slots=num_slots, max_pages=max_pages, page_size=page_size, device=device)
        self.windows = PageTable(num_slots=num_slots, max_pages=max_pages, page_size=page_size, device=device)
        self._both = torch.cat((self.rows, self.windows.rows))  # one tensor, for one scatter
        self.rows, self.windows.rows = self._both.chunk(2)

    def update(self, items: list[PlanItem]) -> None:
        first = len(self.rows)
        full = ((item.slot, item.page_start, item.new_pages) for item in items)
        windows = ((first + item.slot, item.window_start, item.new_window) for item in items)
        self._append(self._both, chain(full, windows))

    def window_rows(self, slots: Tensor, positions: Tensor) -> WindowRows:
        column = positions // self.page_size
        return WindowRows(self.windows.rows, self.windows.rows[slots, column].to(torch.int64))
