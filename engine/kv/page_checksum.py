"""A 64-bit checksum of KV pages, the same on every device: a reduction on the device, so CUDA pages never visit the host.

    word w at position i of page j, all of 64 bits, arithmetic modulo 2^64:
    sum over j of mix(j + seed + sum over i of mix(w[i] + (i + 1) * ODD))

`mix` is bijective (engine/kv/splitmix.py), so a single changed word always changes the sum; other damage passes once in 2^64.
It does not stop a forger.
"""

from collections.abc import Callable, Sequence

import torch

from engine.background import start_in_thread
from engine.kv.kv_pool import KVPool
from engine.kv.splitmix import GOLDEN, mix, signed
from engine.kv.upload import upload

NAME = "splitmix64"  # peers must compute the same
SCRATCH_BYTES = {"cpu": 1 << 18}  # stays in a core's cache; other devices:
MORE_SCRATCH_BYTES = 1 << 26
MOST_PAGES = 1 << 16  # of a kernel's launch
WORD_BYTES = 8
ODD = signed(GOLDEN)

PageSums = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (words [pages, n], pages [k]) -> [k], all int64
Pending = Callable[[], int | None]  # None: the device has not come to it; ask again


class PageChecksum:
    """Call it once the step that wrote the pages has been collected, and then what it returns.

    `page_sums`: a kernel for the inner sums (engine/kernels/page_sums.py): one pass, where torch's operators take twelve.
    `wakeup` is called in a thread when a checksum is there that was not when it was asked for.
    """

    def __init__(
        self, pool: KVPool, *, page_sums: PageSums | None = None, wakeup: Callable[[], None] = lambda: None
    ) -> None:
        assert pool.page_bytes % WORD_BYTES == 0, pool.page_bytes
        self._words = pool.buffer.view(torch.int64).view(1 + pool.num_pages, pool.page_bytes // WORD_BYTES)
        positions = torch.arange(1, self._words.shape[1] + 1, dtype=torch.int64, device=pool.device)
        self._offsets = positions * ODD
        scratch = SCRATCH_BYTES.get(pool.device.type, MORE_SCRATCH_BYTES)
        self.pages_at_a_time = max(1, scratch // pool.page_bytes)
        self._page_sums = page_sums
        self._wakeup = wakeup
        if page_sums is not None:
            self.pages_at_a_time = MOST_PAGES
            page_sums(self._words, upload(torch.tensor([0]), pool.device))  # compiled before a request waits for it

    def __call__(self, pages: Sequence[int]) -> Pending:
        """Compute the checksum of `pages`, in their order; signed, 64 bits. On CUDA beside the steps: nothing waits for it."""
        total = torch.zeros((), dtype=torch.int64, device=self._words.device)
        for at in range(0, len(pages), self.pages_at_a_time):
            part = upload(torch.tensor(pages[at : at + self.pages_at_a_time], dtype=torch.int64), self._words.device)
            number = torch.arange(at + 1, at + 1 + len(part), dtype=torch.int64, device=self._words.device)
            if self._page_sums is not None:
                sums = self._page_sums(self._words, part)
            else:
                sums = mix(self._words[part].add_(self._offsets)).sum(dim=1)
            total += mix(sums.add_(number * ODD)).sum()
        return _known(int(total)) if total.device.type == "cpu" else _on_its_way(total, self._wakeup)


def _known(value: int) -> Pending:
    return lambda: value


def _on_its_way(total: torch.Tensor, wakeup: Callable[[], None]) -> Pending:
    host = torch.empty(total.shape, dtype=total.dtype, pin_memory=True).copy_(total, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    event.record()

    def value() -> int:
        event.synchronize()
        return int(host)

    landed = start_in_thread(value, name="checksum", when_done=wakeup)
    return lambda: landed.result() if landed.done() else None
