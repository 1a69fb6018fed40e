"""Device rows slot -> page ids, written by plans in stream order."""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.kv.upload import upload


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
        self._append((item.slot, item.page_start, item.new_pages) for item in items)

    def _append(self, new: Iterable[tuple[int, int, list[int]]]) -> None:
        """`new`: (row, column, pages from there on)."""
        slots: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for slot, start, ids in new:
            n = len(ids)
            slots += [slot] * n
            columns += range(start, start + n)
            pages += ids
        if pages:
            at = upload(torch.tensor([slots, columns, pages]), self.device)
            self.rows[at[0], at[1]] = at[2].to(torch.int32)

    def locate(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (pages, offsets) of positions of the slots' requests, all [T] int64."""
        column = positions // self.page_size
        return self.rows[slots, column].to(torch.int64), positions - column * self.page_size


class WindowedPageTable(PageTable):
    """A page table of layers that see all, and `windows`: of layers with a pool apart."""

    def __init__(self, *, num_slots: int, max_pages: int, page_size: int, device: torch.device) -> None:
        super().__init__(num_slots=num_slots, max_pages=max_pages, page_size=page_size, device=device)
        self.windows = PageTable(num_slots=num_slots, max_pages=max_pages, page_size=page_size, device=device)

    def update(self, items: list[PlanItem]) -> None:
        super().update(items)
        self.windows._append((item.slot, item.window_start, item.new_window) for item in items)
