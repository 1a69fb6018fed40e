"""64-bit checksum of KV pages, reduced on the device and equal on all devices.

With word i of unit u of page j, modulo 2^64, N units a page, W words a unit without padding:

  sum over j, u, i of mix(w[j, u, i] + (((j * N + u) * W + i) + 1) * ODD)

Positions are the model's, so sums of any ranks add up (`combine`). Bits after a
request's last token count as zero. `mix` is a bijection: one changed word always
changes the sum, other damage passes once in 2^64. No defence against forgers.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from engine.kv.cache_spec import KVShard
from engine.kv.kv_pool import KVPool
from engine.kv.state_pool import STATE, StatePool
from engine.kv.step_batch import upload

GOLDEN = 0x9E3779B97F4A7C15
MUL_1 = 0xBF58476D1CE4E5B9
MUL_2 = 0x94D049BB133111EB


def signed(x: int) -> int:
    """The same 64 bits as a signed number."""
    return x - (1 << 64) if x >> 63 else x


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer in place, a bijection of int64 (Steele, Lea, Flood 2014)."""
    x.bitwise_xor_(shift(x, 30)).mul_(signed(MUL_1))
    x.bitwise_xor_(shift(x, 27)).mul_(signed(MUL_2))
    return x.bitwise_xor_(shift(x, 31))


def shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


NAME = "splitmix64-tokens"  # peers must compute the same
SCRATCH_WORDS = 1 << 15  # of torch's sums: they stay in a core's cache
WORD_BYTES = 8
WINDOWS = 1 << 61  # position of window pages' words, after all others
ODD = signed(GOLDEN)

# (words [n], starts int64[k], keys int64[k], count, step, bits int64[m]) -> int64[k]: `word_sums`
WordSums = Callable[[Tensor, Tensor, Tensor, int, int, Tensor | None], Tensor]
Pending = Callable[[], int | None]  # None: not computed yet, poll again
Values = Callable[[], list[int] | None]
Later = Callable[[Callable[[], Tensor], int], Values]  # (work that returns int64[n], bytes that it reads) -> a poll


def word_sums(words: Tensor, starts: Tensor, keys: Tensor, count: int, step: int, bits: Tensor | None = None) -> Tensor:
    """Row r: the sum over i < count of mix((words[starts[r] + i] & bits[i % m]) + keys[r] + (i + 1) * step)."""
    sums = torch.zeros_like(starts)
    for at in range(0, count, SCRATCH_WORDS):
        number = torch.arange(at, min(at + SCRATCH_WORDS, count), device=words.device)
        rows, positions = max(1, SCRATCH_WORDS // len(number)), (number + 1) * step
        for row in range(0, len(starts), rows):
            of = slice(row, row + rows)
            first = int(starts[row]) + at  # a slice is twice as fast as an index
            x = words[starts[of, None] + number] if rows > 1 else words[None, first : first + len(number)]
            x = x.to(torch.int64) if bits is None else x & bits[number % len(bits)]
            sums[of] += mix(x + positions + keys[of, None]).sum(1)
    return sums


def at_once(work: Callable[[], Tensor], size_bytes: int) -> Values:
    known = work().tolist()
    return lambda: known


INLINE_BYTES = 8 << 20  # a millisecond: another thread may wait as long for a core


class Concurrent:
    """Large CPU sums in a thread, a GPU's on the current stream. `wakeup`: a late one is ready."""

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._thread = ThreadPoolExecutor(1, "checksum")

    def __call__(self, work: Callable[[], Tensor], size_bytes: int) -> Values:
        return at_once(work, size_bytes) if size_bytes < INLINE_BYTES else self._late(lambda: work().tolist())

    def on_gpu(self, work: Callable[[], Tensor], size_bytes: int) -> Values:
        totals = work()
        host = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True).copy_(totals, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        return self._late(lambda: event.synchronize() or host.tolist())

    def _late(self, values: Callable[[], list[int]]) -> Values:
        landed = self._thread.submit(values)
        landed.add_done_callback(lambda _: self._wakeup())
        return lambda: landed.result() if landed.done() else None


class PageChecksum:
    """Called after the writing step was collected. `begin`: the first word's position."""

    def __init__(
        self,
        pool: KVPool,
        *,
        held: KVShard | None = None,
        sums: WordSums = word_sums,
        begin: int = 0,
        later: Later = at_once,
    ) -> None:
        assert pool.unit_bytes % WORD_BYTES == 0, pool.unit_bytes
        self._pool = pool
        self._held = held or pool.held
        assert len(self._held.units) == pool.units and len(self._held.layers) == pool.num_parts, self._held
        self._words = pool.buffer.view(torch.int64)
        self._count, first, self._of_unit = _places(pool, self._held)
        self._begin = begin + first
        self._sums, self._later = sums, later
        if pool.device.type != "cpu":
            self([0, 0], 1 + pool.page_size)  # compiled before a request waits for it

    def __call__(self, pages: Sequence[int], num_tokens: int | None = None) -> Pending:
        """Compute a signed 64-bit checksum.

        `num_tokens`: up to the end of the last page, by default full.
        """
        starts, keys = self._places(pages)
        in_last = (num_tokens or 0) % self._pool.page_size if pages else 0
        full = len(starts) - self._pool.units * (in_last > 0)
        bits = self._pool.bits_of(in_last).view(torch.int64) if in_last else None

        def total() -> Tensor:
            sums = self._sums(self._words, starts[:full], keys[:full], self._count, ODD, None).sum()
            if bits is not None:
                sums += self._sums(self._words, starts[full:], keys[full:], self._count, ODD, bits).sum()
            return sums.view(1)

        values = self._later(total, len(pages) * self._pool.page_bytes)

        def value() -> int | None:
            there = values()
            return None if there is None else there[0]

        return value

    def _places(self, pages: Sequence[int]) -> Tensor:
        """int64[2, units]: first words, and their positions times ODD."""
        held, unit = self._held, np.arange(self._pool.units)
        starts = (np.array(pages, np.int64)[:, None] * len(unit) + unit) * (self._pool.unit_bytes // WORD_BYTES)
        units = np.arange(len(pages))[:, None] * held.num_units + (held.units.start + unit)
        places = np.stack((starts, (units * self._of_unit + self._begin) * ODD))
        return upload(torch.from_numpy(places.reshape(2, -1)), self._pool.device)


def _places(pool: KVPool, held: KVShard) -> tuple[int, int, int]:
    count = -(-pool.unit_end // WORD_BYTES)
    if len(held.layers) == held.num_layers:
        return count, 0, count
    layer, rest = divmod(pool.unit_end // len(held.layers), WORD_BYTES)
    sizes = {spec.bytes_per_token() for spec in pool.specs}
    assert len(sizes) == 1 and rest == 0, "layers of a stage must be alike, and of whole words"
    return count, held.layers.start * layer, held.num_layers * layer


BEGIN = 1 << 62  # after all words of pages
CONV_WORD, RECURRENT_WORD = torch.int16, torch.int32
assert RECURRENT_WORD.itemsize == STATE.itemsize


class StateChecksum:
    """Checksum of recurrent states by byte positions, a part for each contiguous range.

    Words have 2 bytes in conv inputs and 4 in recurrent states, so ranks may split between channels
    and heads. `layers`: the pool's among the model's recurrent ones.
    """

    def __init__(self, pool: StatePool, *, layers: range, sums: WordSums = word_sums, later: Later = at_once) -> None:
        self._slot_bytes = pool.slot_bytes
        self._sums, self._later = sums, later
        self._names, self._groups = list[str](), list[tuple[Tensor, Tensor, Tensor, int, int]]()
        of_kind = itemgetter(3, 2)
        for (word, size), alike in groupby(sorted(_runs(pool, layers), key=of_kind), key=of_kind):
            begins, places, *_ = zip(*alike, strict=True)
            self._names += [f"state {begin}-{begin + size}" for begin in begins]
            keys = [signed((BEGIN + begin - word) * GOLDEN % (1 << 64)) for begin in begins]
            starts, keys = upload(torch.tensor([[at // word for at in places], keys]), pool.device)
            words = pool.slots.view(-1).view(CONV_WORD if word == CONV_WORD.itemsize else RECURRENT_WORD)
            self._groups.append((words, starts, keys, size // word, word))
        if pool.device.type != "cpu":
            self(0)  # compiled before a request waits for it

    def __call__(self, slot: int) -> Callable[[], dict[str, int] | None]:
        def sums() -> Tensor:
            return torch.cat([self._of(slot, *group) for group in self._groups])

        values = self._later(sums, self._slot_bytes)

        def found() -> dict[str, int] | None:
            there = values()
            return None if there is None else dict(zip(self._names, there, strict=True))

        return found

    def _of(self, slot: int, words: Tensor, starts: Tensor, keys: Tensor, count: int, word: int) -> Tensor:
        step = signed(word * GOLDEN % (1 << 64))
        return self._sums(words, starts + slot * (self._slot_bytes // word), keys, count, step, None)


def _runs(pool: StatePool, layers: range) -> Iterator[tuple[int, int, int, int]]:
    """Yield (byte of the model's state, byte of a slot, bytes, bytes of a word) per range."""
    runs = iter(pool.runs(layers))
    for spec in pool.specs:
        for _ in spec.part.channels:
            yield *next(runs), CONV_WORD.itemsize
        yield *next(runs), RECURRENT_WORD.itemsize
