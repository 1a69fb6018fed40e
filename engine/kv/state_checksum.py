"""Checksum of recurrent states, as in engine/kv/page_checksum.py with byte positions.

Words have 2 bytes in conv inputs and 4 in recurrent states, so ranks may split between channels and
heads. Each contiguous range is a part.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.kv.page_checksum import MORE_SCRATCH_BYTES, ODD, SCRATCH_BYTES, WORD_BYTES, values_of
from engine.kv.splitmix import GOLDEN, mix, signed
from engine.kv.state_pool import STATE, StatePool

BEGIN = 1 << 62  # after all words of pages
CONV_WORD, RECURRENT_WORD = torch.int16, torch.int32
assert RECURRENT_WORD.itemsize == STATE.itemsize


class StateChecksum:
    """`layers`: the pool's among the model's recurrent ones."""

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
