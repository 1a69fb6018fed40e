"""Small files that several processes map. Their room is reserved: a write into a page for which a file system has none ends the process (SIGBUS)."""

import mmap
import os
from pathlib import Path

from service.flags import ConfigError


def mapped(path: str | os.PathLike[str], size: int = 0) -> memoryview:
    """Map a file in words of 8 bytes. `size`: in bytes, to make it that long (new bytes are 0); 0: as it is.

    Raises ConfigError if the file system has no room for it; OSError if it is to be as it is, and is not there.
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
