"""A 64-bit checksum of KV pages, the same on every device: a reduction on the device, so CUDA pages never visit the host.

    word i of unit u of page j, all of 64 bits, arithmetic modulo 2^64; N units a page, W words a unit without its padding:
    sum over j, u, i of mix(w[j, u, i] + (((j * N + u) * W + i) + 1) * ODD)

It is a sum over words and their places in the model's KV, so what ranks compute of their units and layers adds up (`combine` in held.py)
to the same value, however many ranks there are. Of a page that a request has not filled, bits behind its last token count as zero: they
are of earlier owners, and may differ from rank to rank.

`mix` is bijective (engine/kv/splitmix.py), so a single changed word always changes the sum; other damage passes once in 2^64.
It does not stop a forger.
"""

from collections.abc import Callable, Sequence

import torch

from engine.background import start_in_thread
from engine.kv.held import HeldKV
from engine.kv.kv_pool import KVPool
from engine.kv.splitmix import GOLDEN, mix, signed
from engine.kv.upload import upload

NAME = "splitmix64-tokens"  # peers must compute the same
SCRATCH_BYTES = {"cpu": 1 << 18}  # stays in a core's cache; other devices:
MORE_SCRATCH_BYTES = 1 << 26
MOST_ROWS = 1 << 16  # of a kernel's launch
WORD_BYTES = 8
WINDOWS = 1 << 61  # where the words of pages of windows begin: behind all others
ODD = signed(GOLDEN)

# (words [rows, n], rows [k], keys [k], count) -> [k], all int64: of each of `rows` the sum over its first `count` words
PageSums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
Pending = Callable[[], int | None]  # None: the device has not come to it; ask again


class PageChecksum:
    """Call it once the step that wrote the pages has been collected, and then what it returns.

    `held`: the part of the model's KV in `pool`; None: all. `page_sums`: a kernel for the inner sums
    (engine/kernels/page_sums.py): one pass, where torch's operators take twelve.
    `begin`: the place of the first word. `wakeup` is called in a thread when a checksum that was not ready has become so.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        held: HeldKV | None = None,
        page_sums: PageSums | None = None,
        begin: int = 0,
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        assert pool.unit_bytes % WORD_BYTES == 0, pool.unit_bytes
        self._pool = pool
        self._held = held or pool.held
        assert len(self._held.units) == pool.units and len(self._held.layers) == pool.num_parts, self._held
        self._words = pool.buffer.view(torch.int64).view((1 + pool.num_pages) * pool.units, -1)
        self._count, first, self._of_unit = _places(pool, self._held)
        self._begin = begin + first
        self._offsets = torch.arange(1, self._count + 1, dtype=torch.int64, device=pool.device) * ODD
        self._units = torch.arange(pool.units, dtype=torch.int64)
        scratch = SCRATCH_BYTES.get(pool.device.type, MORE_SCRATCH_BYTES)
        self.pages_at_a_time = max(1, scratch // pool.page_bytes)
        self._page_sums = page_sums
        self._wakeup = wakeup
        if page_sums is not None:
            self.pages_at_a_time = max(1, MOST_ROWS // pool.units)
            none = upload(torch.tensor([0]), pool.device)
            page_sums(self._words, none, none, self._count)  # compiled before a request waits for it

    def __call__(self, pages: Sequence[int], num_tokens: int | None = None) -> Pending:
        """Compute the checksum of `pages`, in their order; signed, 64 bits. On CUDA beside the steps: nothing waits for it.

        `num_tokens`: of the request, up to the end of its last page; None: it has filled all pages.
        """
        total = torch.zeros((), dtype=torch.int64, device=self._words.device)
        in_last = (num_tokens or 0) % self._pool.page_size
        num_filled = len(pages) - (in_last > 0 and len(pages) > 0)
        for at in range(0, num_filled, self.pages_at_a_time):
            rows, keys = self._upload_places(pages[at : min(at + self.pages_at_a_time, num_filled)], at)
            if self._page_sums is not None:
                total += self._page_sums(self._words, rows, keys, self._count).sum()
            else:
                total += self._sum(self._words[:, : self._count][rows], keys)
        if num_filled < len(pages):
            rows, keys = self._upload_places(pages[num_filled:], num_filled)
            bits = self._pool.bits_of(in_last).view(torch.int64)[: self._count]
            total += self._sum(self._words[:, : self._count][rows].bitwise_and_(bits), keys)
        values = values_of(total.view(1), self._wakeup)

        def value() -> int | None:
            there = values()
            return None if there is None else there[0]

        return value

    def _sum(self, words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """`words` [n, count], overwritten; `keys` [n]."""
        return mix(words.add_(self._offsets).add_(keys[:, None])).sum()

    def _upload_places(self, pages: Sequence[int], first: int) -> torch.Tensor:
        """[2, units of all pages] int64: their rows of words, and where their words begin in the model's, times ODD."""
        held, number = self._held, torch.arange(first, first + len(pages))
        rows = torch.tensor(pages, dtype=torch.int64)[:, None] * len(self._units) + self._units
        units = number[:, None] * held.num_units + held.units.start + self._units
        places = torch.stack((rows.flatten(), (units.flatten() * self._of_unit + self._begin) * ODD))
        return upload(places, self._words.device)


def _places(pool: KVPool, held: HeldKV) -> tuple[int, int, int]:
    """Return (words of a unit here, how many the model's unit has before them, and in all), without padding."""
    count = -(-pool.unit_end // WORD_BYTES)
    if len(held.layers) == held.num_layers:
        return count, 0, count
    layer, rest = divmod(pool.unit_end // len(held.layers), WORD_BYTES)
    sizes = {spec.bytes_per_token() for spec in pool.specs}
    assert len(sizes) == 1 and rest == 0, "layers of a stage must be alike, and of whole words"
    return count, held.layers.start * layer, held.num_layers * layer


def values_of(totals: torch.Tensor, wakeup: Callable[[], None]) -> Callable[[], list[int] | None]:
    """Return what gives `totals` [n] int64 once the device has come to them. `wakeup`: as of PageChecksum."""
    if totals.device.type == "cpu":
        known = totals.tolist()
        return lambda: known
    host = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True).copy_(totals, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    event.record()

    def values() -> list[int]:
        event.synchronize()
        return list(host.tolist())

    landed = start_in_thread(values, name="checksum", when_done=wakeup)
    return lambda: landed.result() if landed.done() else None
