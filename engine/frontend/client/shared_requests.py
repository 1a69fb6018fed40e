"""What the frontends of one worker know of each other's live requests: how many there are, and their names.

A count is a cell of shared memory with one writer. A name is a locked byte of a file, at the name's hash: the kernel gives it to one
process, and takes it back when that process ends.
"""

import fcntl
import hashlib
import mmap
import os


class SharedRequests:
    """Open it once in a process: a process loses its locks when it closes any descriptor of the file."""

    def __init__(self, folder: str, *, row: int, num_rows: int) -> None:
        self._row = row
        counts = os.open(f"{folder}/live", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(counts, 8 * num_rows)
        self._counts = memoryview(mmap.mmap(counts, 8 * num_rows)).cast("q")
        os.close(counts)
        self._names = os.open(f"{folder}/names", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def num_live(self) -> int:
        """Of all frontends. Two that begin requests at the same moment may not see each other's."""
        return sum(self._counts)

    def publish(self, num_live: int) -> None:
        self._counts[self._row] = num_live

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
