"""Step data for attention kernels: lengths, page tables, destinations of new tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(slots=True)
class WindowRows:
    """StepBatch tables of the window pool; rows have stale pages before the window."""

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
    - riders: decodes in an extend step; None: any request of one token may be
    - state_slots: int32[B] (engine/kv/state_pool.py); windows: tables of a window pool
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
    state_slots: torch.Tensor | None = None
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
    """Decode step with lengths int32[B] only on the device, for captured graphs."""

    page_table: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    paths: TreePaths | None = None


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
