"""Files of processes: shared memory maps, directories of Unix sockets, the ready file."""

import json
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

from service.flags import ConfigError

# ---- Small shared memory-mapped files, preallocated, as a write into a full file system is SIGBUS.


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


# ---- The directory of Unix sockets, with paths of up to 107 bytes (unix(7)).

LONGEST_PATH = 107
BELOW = 48  # for the rest: "/tandem-ipc-PID-8 letters/frontend@ROW.RANK"
SHORT = "/tmp"


def fits(path: str | os.PathLike[str]) -> bool:
    return len(os.fsencode(path)) <= LONGEST_PATH


def socket_folder() -> str:
    """The temporary directory, or /tmp if too long. Raises ConfigError."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= LONGEST_PATH - BELOW:
        return folder
    if os.access(SHORT, os.W_OK | os.X_OK):
        return SHORT
    raise ConfigError(
        f"TMPDIR {folder}: too long for the sockets below it, and {SHORT} cannot be written; name a directory of at most "
        f"{LONGEST_PATH - BELOW} bytes by TMPDIR"
    )


# ---- The ready file of a process or cluster, with its address.


def write_ready_file(name: str | None, value: dict[str, Any]) -> None:
    """Write JSON atomically, if there is a `name`."""
    if name:
        path = Path(name)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(value))
        draft.replace(path)


def clear_ready_file(name: str | None) -> None:
    """Remove an earlier ready file. Raises ConfigError."""
    if name:
        path = Path(name)
        if not path.parent.is_dir():
            raise ConfigError(f"--ready-file: {path.parent} is no directory; create it first")
        path.unlink(missing_ok=True)
