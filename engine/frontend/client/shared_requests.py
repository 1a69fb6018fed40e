"""Live requests over a worker's frontends: counts and tokens per DP rank, names.

A count is a cell of shared memory with one writer. A name is a locked byte of a file, at its hash,
so the kernel releases it with its process.
"""

import fcntl
import hashlib
import os

from engine.frontend.client.dp_policy import RankLoad
from service.process.shared_file import mapped


class SharedRequests:
    """Open it once per process: closing any descriptor of the file drops all locks."""

    def __init__(self, folder: str, *, row: int, num_rows: int, num_ranks: int = 1) -> None:
        self._row = row
        self._num_ranks = num_ranks
        # by row, then rank: requests, tokens
        self._counts = mapped(f"{folder}/live", 2 * 8 * num_rows * num_ranks)
        self._names = os.open(f"{folder}/names", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def num_live(self) -> int:
        """Concurrent starts may not count each other."""
        return sum(self._counts[::2])

    def loads(self) -> list[RankLoad]:
        counts, step = self._counts.tolist(), 2 * self._num_ranks
        return [RankLoad(sum(counts[2 * r :: step]), sum(counts[2 * r + 1 :: step])) for r in range(self._num_ranks)]

    def publish(self, num_live: int, *, rank: int = 0, num_tokens: int = 0) -> None:
        place = 2 * (self._row * self._num_ranks + rank)
        self._counts[place], self._counts[place + 1] = num_live, num_tokens

    def claim(self, name: str) -> bool:
        try:
            fcntl.lockf(self._names, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(name))
        except BlockingIOError:
            return False
        return True

    def release(self, name: str) -> None:
        fcntl.lockf(self._names, fcntl.LOCK_UN, 1, _place(name))

    def close(self) -> None:
        os.close(self._names)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8]) >> 2
