"""What the frontends of one worker know of each other's live requests: how many each DP rank has, their tokens, their names.

A figure is a cell of shared memory with one writer. A name is a locked byte of a file, at the name's hash: the kernel gives it to one
process, and takes it back when that process ends.
"""

import fcntl
import hashlib
import os

from engine.frontend.client.dp_policy import RankLoad
from service.process.shared_file import mapped


class SharedRequests:
    """Open it once in a process: a process loses its locks when it closes any descriptor of the file."""

    def __init__(self, folder: str, *, row: int, num_rows: int, num_ranks: int = 1) -> None:
        self._row = row
        self._num_ranks = num_ranks
        # By row, then rank: requests, tokens.
        self._counts = mapped(f"{folder}/live", 2 * 8 * num_rows * num_ranks)
        self._names = os.open(f"{folder}/names", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def num_live(self) -> int:
        """Count the live requests of all frontends. Two that begin requests at once may not see each other's."""
        return sum(self._counts[::2])

    def loads(self) -> list[RankLoad]:
        """Count the live requests of all frontends by rank."""
        counts, step = self._counts.tolist(), 2 * self._num_ranks
        return [RankLoad(sum(counts[2 * r :: step]), sum(counts[2 * r + 1 :: step])) for r in range(self._num_ranks)]

    def publish(self, num_live: int, *, rank: int = 0, num_tokens: int = 0) -> None:
        """This frontend's, at one rank."""
        place = 2 * (self._row * self._num_ranks + rank)
        self._counts[place], self._counts[place + 1] = num_live, num_tokens

    def claim(self, name: str) -> bool:
        """Take a name; False if another frontend has it."""
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
    """62 bits: below the largest offset of a file."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8]) >> 2
