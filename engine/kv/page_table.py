"""Device rows slot -> page ids, written by plans in stream order."""

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
        self._page_size = page_size
        self.device = device

    def update(self, items: list[PlanItem]) -> None:
        """Append each item's new pages to its row, in one scatter."""
        slots: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for item in items:
            n = len(item.new_pages)
            slots += [item.slot] * n
            columns += range(item.page_start, item.page_start + n)
            pages += item.new_pages
        if pages:
            at = upload(torch.tensor([slots, columns, pages]), self.device)
            self.rows[at[0], at[1]] = at[2].to(torch.int32)

    def locate(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (pages, offsets) of positions of the slots' requests, all [T] int64."""
        column = positions // self._page_size
        return self.rows[slots, column].to(torch.int64), positions - column * self._page_size
