"""Pages in host memory: their bytes, and copies of KV pages into them and back, as plans say."""

import sys

import torch
from torch import Tensor

from engine.core.plan import PageCopy, PlanItem
from engine.kv.kv_pool import KVPool, zeroed_bytes
from engine.kv.page_copies import DirectCopies, PageCopies, StagedCopies
from engine.kv.pinned import CudaRegistrar, PinnedBytes
from engine.kv.side_stream import CudaSideStream


class HostPool:
    """`num_pages` pages, numbered from 0. For a pool on a CUDA device they are pinned, and `threads` touch them at start."""

    def __init__(self, pool: KVPool, *, num_pages: int, threads: int = 1) -> None:
        self.num_pages = num_pages
        self.page_bytes = pool.page_bytes
        self._page_size = pool.page_size
        size_bytes, device = num_pages * pool.page_bytes, pool.device
        device_pages = _words(pool.buffer, 1 + pool.num_pages)
        self._pinned: PinnedBytes | None = None
        if device.type == "cpu":
            buffer = zeroed_bytes(size_bytes, device)
            self._copies: PageCopies = DirectCopies(device_pages, _words(buffer, num_pages))
        else:
            self._pinned = PinnedBytes(size_bytes, registrar=CudaRegistrar(), threads=threads)
            buffer = self._pinned.tensor
            self._copies = StagedCopies(
                device_pages, _words(buffer, num_pages), make_stream=lambda: CudaSideStream.on(device)
            )
        self._bytes = buffer.numpy().data

    def page(self, host_page: int) -> memoryview:
        """Return its bytes, writable. No step in flight may touch them."""
        return self._bytes[host_page * self.page_bytes : (host_page + 1) * self.page_bytes]

    def copy(self, seq: int, *, out: list[PageCopy], back: list[PageCopy]) -> None:
        """Copy out, then back, in the order of steps: a page may go both ways in step `seq`."""
        self._copies.run(seq, out=out, back=back)

    def guard(self, items: list[PlanItem]) -> None:
        """Call it before the forward of `items`: pages that they are the first to write may still be on their way out."""
        size = self._page_size
        self._copies.guard(
            page for item in items for page in item.new_pages[max(0, item.start // size - item.page_start) :]
        )

    def wait(self, seq: int) -> None:
        """Block until the copies of every step up to `seq` have landed. The end of its forward does not say so."""
        self._copies.wait(seq)

    def close(self) -> None:
        """Unpin the pages, once no copy touches them. Nothing is launched any more."""
        self._copies.wait(sys.maxsize)
        if self._pinned is not None:
            self._pinned.close()


def _words(buffer: Tensor, num_pages: int) -> Tensor:
    """View as [num_pages, page_bytes / 8] int64: a gather moves words (a page is a multiple of 64 bytes)."""
    return buffer.view(torch.int64).view(num_pages, -1)
