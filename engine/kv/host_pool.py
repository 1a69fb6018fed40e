"""The bytes of the host tier: copies pages out of the KV pool and back, in stream order, as plans say."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.core.plan import PageCopy, Plan
from engine.kv.kv_pool import KVPool, zeroed_bytes
from engine.kv.upload import upload

STAGING_BYTES = 64 << 20  # of device memory that a copy may take beside the pool


class HostPool:
    """`num_pages` pages, numbered from 0; pinned for a pool on a CUDA device.

    There a copy is a gather on the device and one transfer for each run of neighbouring host pages, all enqueued: a host page
    must not change until its step is collected.
    """

    def __init__(self, pool: KVPool, *, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = pool.page_bytes
        self._device_pages = _words(pool.buffer, 1 + pool.num_pages)
        self._on_cpu = pool.device.type == "cpu"
        size_bytes = num_pages * pool.page_bytes
        if self._on_cpu:
            buffer = zeroed_bytes(size_bytes, pool.device)
        else:
            buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self._pages = _words(buffer, num_pages)
        self._bytes = buffer.numpy().data
        self._per_copy = max(1, STAGING_BYTES // pool.page_bytes)

    def page(self, host_page: int) -> memoryview:
        """Return its bytes, writable. No step in flight may touch them."""
        return self._bytes[host_page * self.page_bytes : (host_page + 1) * self.page_bytes]

    def run(self, plan: Plan) -> None:
        """Copy out, then back: a page may go both ways in one step."""
        for at in range(0, len(plan.to_host), self._per_copy):
            self._copy_out(plan.to_host[at : at + self._per_copy])
        for at in range(0, len(plan.from_host), self._per_copy):
            self._copy_back(plan.from_host[at : at + self._per_copy])

    def _copy_out(self, copies: list[PageCopy]) -> None:
        if self._on_cpu:
            for copy in copies:
                self._pages[copy.host_page].copy_(self._device_pages[copy.page])
            return
        staged = self._device_pages[self._index([c.page for c in copies])]
        for at, host_page, n in runs([c.host_page for c in copies]):
            self._pages[host_page : host_page + n].copy_(staged[at : at + n], non_blocking=True)

    def _copy_back(self, copies: list[PageCopy]) -> None:
        if self._on_cpu:
            for copy in copies:
                self._device_pages[copy.page].copy_(self._pages[copy.host_page])
            return
        staged = torch.empty(len(copies), *self._pages.shape[1:], dtype=torch.int64, device=self._device_pages.device)
        for at, host_page, n in runs([c.host_page for c in copies]):
            staged[at : at + n].copy_(self._pages[host_page : host_page + n], non_blocking=True)
        self._device_pages[self._index([c.page for c in copies])] = staged

    def _index(self, pages: list[int]) -> Tensor:
        return upload(torch.tensor(pages, dtype=torch.int64), self._device_pages.device)


def _words(buffer: Tensor, num_pages: int) -> Tensor:
    """View as [num_pages, page_bytes / 8] int64: a gather moves words (a page is a multiple of 64 bytes)."""
    return buffer.view(torch.int64).view(num_pages, -1)


def runs(pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, its page, length) of each run of successive pages."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start], i - start
            start = i
