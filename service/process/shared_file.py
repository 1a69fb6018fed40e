"""Small shared memory-mapped files, preallocated, as a write into a full file system is SIGBUS."""

import mmap
import os
from pathlib import Path

from service.flags import ConfigError


def mapped(path: str | os.PathLike[str], size: int = 0) -> memoryview:
    """Map a file as 8-byte words, extended to `size` bytes unless 0.

    Raises ConfigError if there is no space, OSError for a missing file and `size` 0.
    """
    try:
        return _mapped(path, size)
    except OSError as error:
        if not size:
            raise
        raise ConfigError(
            f"{Path(path).parent}: cannot keep {size} bytes there ({error.strerror}); free some, or name another directory by TMPDIR"
        ) from None


def _mapped(path: str | os.PathLike[str], size: int) -> memoryview:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if size else 0), 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
        return memoryview(mmap.mmap(descriptor, size)).cast("q")
    finally:
        os.close(descriptor)
