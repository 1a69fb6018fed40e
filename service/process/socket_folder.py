"""The directory of Unix sockets, with paths of up to 107 bytes (unix(7))."""

import os
import tempfile

from service.flags import ConfigError

LONGEST_PATH = 107
BELOW = 48  # for the rest: "/tandem-ipc-PID-8 letters/frontend@ROW.RANK"
SHORT = "/tmp"


def fits(path: str | os.PathLike[str]) -> bool:
    return len(os.fsencode(path)) <= LONGEST_PATH


def socket_folder() -> str:
    """Return the temporary directory, or /tmp if too long. Raises ConfigError."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= LONGEST_PATH - BELOW:
        return folder
    if os.access(SHORT, os.W_OK | os.X_OK):
        return SHORT
    raise ConfigError(
        f"TMPDIR {folder}: too long for the sockets below it, and {SHORT} cannot be written; name a directory of at most "
        f"{LONGEST_PATH - BELOW} bytes by TMPDIR"
    )
