"""64-bit checksum of KV pages, reduced on the device and equal on all devices.

With word i of unit u of page j, modulo 2^64, N units a page, W words a unit without padding:

  sum over j, u, i of mix(w[j, u, i] + (((j * N + u) * W + i) + 1) * ODD)

Positions are the model's, so sums of any ranks add up (`combine`). Bits after a
request's last token count as zero. `mix` is a bijection: one changed word always
changes the sum, other damage passes once in 2^64. No defence against forgers.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.kv.cache_spec import KVShard
from engine.kv.kv_pool import KVPool
from engine.kv.state_pool import STATE, StatePool
from engine.kv.step_batch import upload
from service.waiter import start_in_thread

GOLDEN = 0x9E3779B97F4A7C15
MUL_1 = 0xBF58476D1CE4E5B9
MUL_2 = 0x94D049BB133111EB


def signed(x: int) -> int:
    """SplitMix64's finalizer on tensors (Steele, Lea, Flood 2014)."""
    return x - (1 << 64) if x >> 63 else x


def mix(x: Tensor) -> Tensor:
    """Mix int64 in place, a bijection."""
    x.bitwise_xor_(shift(x, 30)).mul_(signed(MUL_1))
    x.bitwise_xor_(shift(x, 27)).mul_(signed(MUL_2))
    return x.bitwise_xor_(shift(x, 31))


def shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


NAME = "splitmix64-tokens"  # peers must compute the same
SCRATCH_BYTES = {"cpu": 1 << 18}  # stays in a core's cache; other devices:
MORE_SCRATCH_BYTES = 1 << 26
MAX_ROWS = 1 << 16  # per kernel launch
WORD_BYTES = 8
WINDOWS = 1 << 61  # position of window pages' words, after all others
ODD = signed(GOLDEN)

# int64 (words [rows, n], rows [k], keys [k], count) -> [k]: per row the sum of its first `count`
# words
PageSums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
Pending = Callable[[], int | None]  # None: not computed yet, poll again


class PageChecksum:
    """Checksum, called after the writing step was collected; then poll its result.

    `page_sums` is one kernel instead of twelve operators; `begin` the first word's position.
    `wakeup` is called in a thread when a late checksum is ready.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        held: KVShard | None = None,
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
            self.pages_at_a_time = max(1, MAX_ROWS // pool.units)
            none = upload(torch.tensor([0]), pool.device)
            page_sums(self._words, none, none, self._count)  # compiled before a request waits for it

    def __call__(self, pages: Sequence[int], num_tokens: int | None = None) -> Pending:
        """Compute a signed 64-bit checksum, concurrently to steps on CUDA.

        `num_tokens`: up to the end of the last page, by default full.
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
        return mix(words.add_(self._offsets).add_(keys[:, None])).sum()

    def _upload_places(self, pages: Sequence[int], first: int) -> torch.Tensor:
        """int64[2, units]: rows, and positions of first words times ODD."""
        held, number = self._held, torch.arange(first, first + len(pages))
        rows = torch.tensor(pages, dtype=torch.int64)[:, None] * len(self._units) + self._units
        units = number[:, None] * held.num_units + held.units.start + self._units
        places = torch.stack((rows.flatten(), (units.flatten() * self._of_unit + self._begin) * ODD))
        return upload(places, self._words.device)


def _places(pool: KVPool, held: KVShard) -> tuple[int, int, int]:
    count = -(-pool.unit_end // WORD_BYTES)
    if len(held.layers) == held.num_layers:
        return count, 0, count
    layer, rest = divmod(pool.unit_end // len(held.layers), WORD_BYTES)
    sizes = {spec.bytes_per_token() for spec in pool.specs}
    assert len(sizes) == 1 and rest == 0, "layers of a stage must be alike, and of whole words"
    return count, held.layers.start * layer, held.num_layers * layer


def values_of(totals: torch.Tensor, wakeup: Callable[[], None]) -> Callable[[], list[int] | None]:
    """A poll for int64[n] `totals`."""
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


BEGIN = 1 << 62  # after all words of pages
CONV_WORD, RECURRENT_WORD = torch.int16, torch.int32
assert RECURRENT_WORD.itemsize == STATE.itemsize


class StateChecksum:
    """Checksum of recurrent states by byte positions, a part for each contiguous range.

    Words have 2 bytes in conv inputs and 4 in recurrent states, so ranks may split between channels
    and heads. `layers`: the pool's among the model's recurrent ones.
    """

    def __init__(self, pool: StatePool, *, layers: range, wakeup: Callable[[], None] = lambda: None) -> None:
        self._rows = pool.slots
        self._runs = list(_runs(pool, layers))
        self._names = [f"state {begin}-{begin + size}" for begin, _, size, _ in self._runs]
        self._wakeup = wakeup
        self._at_once = SCRATCH_BYTES.get(pool.device.type, MORE_SCRATCH_BYTES) // WORD_BYTES
        self._numbers = torch.arange(self._at_once, dtype=torch.int64, device=pool.device) * ODD

    def __call__(self, slot: int) -> Callable[[], dict[str, int] | None]:
        row = self._rows[slot]
        sums = [self._sum(row[at : at + size].view(word), begin) for begin, at, size, word in self._runs]
        values = values_of(torch.stack(sums), self._wakeup)

        def found() -> dict[str, int] | None:
            there = values()
            return None if there is None else dict(zip(self._names, there, strict=True))

        return found

    def _sum(self, words: Tensor, begin: int) -> Tensor:
        total, numbers = torch.zeros((), dtype=torch.int64, device=words.device), self._numbers * words.itemsize
        for at in range(0, len(words), self._at_once):
            piece = words[at : at + self._at_once].to(torch.int64)
            first = signed((BEGIN + begin + at * words.itemsize) * GOLDEN % (1 << 64))
            total += mix(piece.add_(numbers[: len(piece)]).add_(first)).sum()
        return total


def _runs(pool: StatePool, layers: range) -> Iterator[tuple[int, int, int, torch.dtype]]:
    """Yield (byte of the model's state, byte of a slot, bytes, word type) per range."""
    runs = iter(pool.runs(layers))
    for spec in pool.specs:
        for _ in spec.part.channels:
            yield *next(runs), CONV_WORD
        yield *next(runs), RECURRENT_WORD
