"""Load and open circuits of all processes of a router, in shared memory.

Each process writes its row and reads the others. Numbers are aligned words; only taking a worker's
slot, by a hash of its URL, needs a lock.
"""

import fcntl
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from service.process.files import mapped

NUM_SLOTS = 32768  # at most MAX_WORKERS are in one table
REREAD_S = 1.0  # others' circuits are read again, even unchanged
_WORD = 8
# A row: live requests, number of circuit changes; the slots; the clients.
_HEADER = 2
_LIVE, _TURNS = range(_HEADER)
# A slot: in use, tokens, requests, end of the open circuit (monotonic ms).
_PER_SLOT = 4
_USED, _TOKENS, _REQUESTS, _OPEN = range(_PER_SLOT)
# Requests per client in a count-min sketch (Cormode, Muthukrishnan 2005): one cell per depth, whose
# minimum is never too low, and too high only if busy clients share a cell in every depth.
_DEPTH, _WIDTH = 3, 4096
_CLIENTS = _HEADER + _PER_SLOT * NUM_SLOTS
_ROW_WORDS = _CLIENTS + _DEPTH * _WIDTH


class SharedLoad:
    """Row `row` of `num_rows` of an initially empty file."""

    def __init__(self, path: Path, *, row: int, num_rows: int) -> None:
        assert 0 <= row < num_rows, (row, num_rows)
        self._words = mapped(path, _WORD * (NUM_SLOTS + num_rows * _ROW_WORDS))
        self._file = os.open(path, os.O_RDWR)  # for locking
        self._begin = NUM_SLOTS + row * _ROW_WORDS
        self._others = tuple(NUM_SLOTS + other * _ROW_WORDS for other in range(num_rows) if other != row)
        self._open: dict[int, int] = {}  # slots with open circuits at others -> end, ms
        self._turns: list[int] = []  # others' change counts at that time
        self._reread_s = 0.0
        self._words[self._begin : self._begin + _ROW_WORDS] = memoryview(bytes(_WORD * _ROW_WORDS)).cast("q")

    def take(self, url: str) -> int:
        """The slot of `url`, the same in all processes. RuntimeError if full."""
        name = (int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "little") >> 1) or 1
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            slot = self._find(name)
            self._words[slot] = name
            self._words[self._at(self._begin, slot, _USED)] = 1
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return slot

    def give_back(self, slot: int) -> None:
        self._words[self._at(self._begin, slot, _USED)] = 0
        self.publish(slot, tokens=0, requests=0)
        self.publish_open(slot, 0.0)

    def publish(self, slot: int, *, tokens: int, requests: int) -> None:
        at = self._at(self._begin, slot, 0)
        self._words[at + _TOKENS] = tokens
        self._words[at + _REQUESTS] = requests

    def publish_live(self, requests: int) -> None:
        self._words[self._begin + _LIVE] = requests

    def others_tokens(self, slot: int) -> int:
        at, words = self._at(0, slot, _TOKENS), self._words
        return sum([words[begin + at] for begin in self._others])

    def others_requests(self, slot: int) -> int:
        at, words = self._at(0, slot, _REQUESTS), self._words
        return sum([words[begin + at] for begin in self._others])

    def publish_open(self, slot: int, until_s: float) -> None:
        """`until_s`: by the machine's monotonic clock, 0 for closed."""
        self._words[self._at(self._begin, slot, _OPEN)] = int(until_s * 1000)
        self._words[self._begin + _TURNS] += 1

    def others_open(self, now_s: float) -> Sequence[int]:
        """Slots with open circuits elsewhere, re-read only on changes and at intervals."""
        turns = [self._words[begin + _TURNS] for begin in self._others]
        if turns != self._turns or now_s >= self._reread_s:
            self._read_open()
            self._turns, self._reread_s = turns, now_s + REREAD_S
        return [slot for slot, until_ms in self._open.items() if until_ms > now_s * 1000] if self._open else ()

    def _read_open(self) -> None:
        self._open.clear()
        for begin in self._others:
            row = self._words[self._at(begin, 0, _OPEN) : self._at(begin, NUM_SLOTS, _OPEN) : _PER_SLOT]
            for slot, until_ms in enumerate(row):
                if until_ms:
                    self._open[slot] = max(until_ms, self._open.get(slot, 0))

    def others_live(self) -> int:
        return sum([self._words[begin + _LIVE] for begin in self._others])

    def add_client(self, client: str, step: int) -> None:
        for at in _cells(client):
            self._words[self._begin + at] += step

    def others_of_client(self, client: str) -> int:
        words = self._words
        return min(sum([words[begin + at] for begin in self._others]) for at in _cells(client))

    def close(self) -> None:
        self._words.release()
        os.close(self._file)

    def _find(self, name: int) -> int:
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
        return begin + _HEADER + _PER_SLOT * slot + what


def _cells(client: str) -> list[int]:
    digest = blake2b(client.encode(errors="replace"), digest_size=4 * _DEPTH).digest()
    return [
        _CLIENTS + depth * _WIDTH + int.from_bytes(digest[4 * depth : 4 * depth + 4], "little") % _WIDTH
        for depth in range(_DEPTH)
    ]
