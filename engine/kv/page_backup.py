"""Copies of retracted requests' KV pages in host memory, out and back in stream order."""

import torch
from torch import Tensor

from engine.core.plan import PageLoad, PageSave, Plan
from engine.kv.kv_pool import KVPool


class PageBackup:
    def __init__(self, pool: KVPool) -> None:
        self._pages = pool.buffer.view(1 + pool.num_pages, pool.page_bytes)
        self._copies: dict[int, Tensor] = {}  # key -> [pages, page_bytes] uint8 on the host

    def run(self, plan: Plan) -> None:
        """Drop copies, then copy out, then back: a key may be dropped and used again in one step."""
        for key in plan.drops:
            del self._copies[key]
        for save in plan.saves:
            self._save(save)
        for load in plan.loads:
            self._load(load)

    def _save(self, save: PageSave) -> None:
        pages = self._pages[self._index(save.pages)]
        if pages.device.type != "cpu":
            pages = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True).copy_(pages, non_blocking=True)
        self._copies[save.key] = pages

    def _load(self, load: PageLoad) -> None:
        copy = self._copies.pop(load.key)[load.start : load.start + len(load.pages)]
        self._pages[self._index(load.pages)] = copy.to(self._pages.device, non_blocking=True)

    def _index(self, pages: list[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._pages.device)
