"""A 64-bit checksum of KV pages, the same on every device: a reduction by torch, so CUDA pages never visit the host.

    word w at position i of page j, all of 64 bits, arithmetic modulo 2^64:
    sum over j of mix(j + seed + sum over i of mix(w[i] + (i + 1) * ODD))

`mix` is bijective (engine/kv/splitmix.py), so a single changed word always changes the sum; other damage passes once in 2^64.
It does not stop a forger.
"""

from collections.abc import Callable, Sequence

import torch

from engine.kv.kv_pool import KVPool
from engine.kv.splitmix import GOLDEN, mix, signed
from engine.kv.upload import upload

NAME = "splitmix64"  # peers must compute the same
SCRATCH_BYTES = {"cpu": 1 << 18}  # stays in a core's cache; other devices:
MORE_SCRATCH_BYTES = 1 << 26
WORD_BYTES = 8
ODD = signed(GOLDEN)

Pending = Callable[[], int | None]  # None: the device has not come to it; ask again


class PageChecksum:
    """Call it once the step that wrote the pages has been collected, and then what it returns."""

    def __init__(self, pool: KVPool) -> None:
        assert pool.page_bytes % WORD_BYTES == 0, pool.page_bytes
        self._words = pool.buffer.view(torch.int64).view(1 + pool.num_pages, pool.page_bytes // WORD_BYTES)
        positions = torch.arange(1, self._words.shape[1] + 1, dtype=torch.int64, device=pool.device)
        self._offsets = positions * ODD
        scratch = SCRATCH_BYTES.get(pool.device.type, MORE_SCRATCH_BYTES)
        self.pages_at_a_time = max(1, scratch // pool.page_bytes)

    def __call__(self, pages: Sequence[int]) -> Pending:
        """Compute the checksum of `pages`, in their order; signed, 64 bits. On CUDA beside the steps: nothing waits for it."""
        total = torch.zeros((), dtype=torch.int64, device=self._words.device)
        for at in range(0, len(pages), self.pages_at_a_time):
            part = upload(torch.tensor(pages[at : at + self.pages_at_a_time], dtype=torch.int64), self._words.device)
            number = torch.arange(at + 1, at + 1 + len(part), dtype=torch.int64, device=self._words.device)
            sums = mix(self._words[part].add_(self._offsets)).sum(dim=1)
            total += mix(sums.add_(number * ODD)).sum()
        return _known(int(total)) if total.device.type == "cpu" else _on_its_way(total)


def _known(value: int) -> Pending:
    return lambda: value


def _on_its_way(total: torch.Tensor) -> Pending:
    host = torch.empty(total.shape, dtype=total.dtype, pin_memory=True).copy_(total, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return lambda: int(host) if event.query() else None
