"""What the processes of one router have in flight, in memory that they share: one view of the load for all of them.

Each process writes its own row and reads the others'; a number is one aligned word, so no lock is needed for them. Workers
are found by a hash of their URL, in whatever order each process learnt of them; only taking a place is done under a lock.
Pure but for the mapped file: no sockets, no clocks.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

NUM_SLOTS = 8192  # places for workers; at most MAX_WORKERS are in one table
_WORD = 8
_PER_SLOT = 3  # of one row: whether its table holds the worker, tokens, requests
_ROW_WORDS = 1 + _PER_SLOT * NUM_SLOTS  # live requests, then the slots
_USED, _TOKENS, _REQUESTS = range(_PER_SLOT)


class SharedLoad:
    """Row `row` of `num_rows` in the file `path`, which is made if need be. What an earlier owner of the row left is wiped."""

    def __init__(self, path: Path, *, row: int, num_rows: int) -> None:
        assert 0 <= row < num_rows, (row, num_rows)
        size = _WORD * (NUM_SLOTS + num_rows * _ROW_WORDS)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self._words = memoryview(self._map).cast("q")
        self._begin = NUM_SLOTS + row * _ROW_WORDS
        self._others = tuple(NUM_SLOTS + other * _ROW_WORDS for other in range(num_rows) if other != row)
        self._words[self._begin : self._begin + _ROW_WORDS] = memoryview(bytes(_WORD * _ROW_WORDS)).cast("q")

    def take(self, url: str) -> int:
        """The place of the worker at `url`, the same in every process. `RuntimeError` when no place is left."""
        name = _name(url)
        with self._locked():
            slot = self._find(name)
            self._words[slot] = name
            self._words[self._at(self._begin, slot, _USED)] = 1
        return slot

    def give_back(self, slot: int) -> None:
        """This process does not know the worker any more."""
        self._words[self._at(self._begin, slot, _USED)] = 0
        self.publish(slot, tokens=0, requests=0)

    def publish(self, slot: int, *, tokens: int, requests: int) -> None:
        """What this process has in flight there."""
        at = self._begin + 1 + _PER_SLOT * slot
        self._words[at + _TOKENS] = tokens
        self._words[at + _REQUESTS] = requests

    def publish_live(self, requests: int) -> None:
        """How many requests this process serves."""
        self._words[self._begin] = requests

    def others_tokens(self, slot: int) -> int:
        """What the other processes have in flight there."""
        at, words = 1 + _PER_SLOT * slot + _TOKENS, self._words
        return sum([words[begin + at] for begin in self._others])

    def others_requests(self, slot: int) -> int:
        at, words = 1 + _PER_SLOT * slot + _REQUESTS, self._words
        return sum([words[begin + at] for begin in self._others])

    def others_live(self) -> int:
        """How many requests the other processes serve."""
        return sum([self._words[begin] for begin in self._others])

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._file)

    def _find(self, name: int) -> int:
        """Where `name` stands; else the first place on its way that nobody uses."""
        start, free = name % NUM_SLOTS, None
        for step in range(NUM_SLOTS):
            slot = (start + step) % NUM_SLOTS
            if self._words[slot] == name:
                return slot
            if free is None and not self._is_used(slot):
                free = slot
            if self._words[slot] == 0:
                break
        if free is None:
            raise RuntimeError(f"{NUM_SLOTS} workers are known to this router, no more fit")
        return free

    def _is_used(self, slot: int) -> bool:
        return any(self._words[self._at(begin, slot, _USED)] for begin in (self._begin, *self._others))

    def _at(self, begin: int, slot: int, what: int) -> int:
        return begin + 1 + _PER_SLOT * slot + what

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _name(url: str) -> int:
    """63 bits of a hash, never 0."""
    return (int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "little") >> 1) or 1
