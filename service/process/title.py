"""The command line of a process as `ps` shows it, for one that was forked and plays another's part.

Linux shows the memory in which the arguments lay at the start. A process may write there, as many servers do to show what they
are busy with; memory that came later is no room.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

ROOM_BYTES = 2048  # of a process that is to change its command line: give it an argument as long as this


def set_command_line(words: Sequence[str]) -> None:
    """Show `words`, cut to the room that there is; nothing where the system does not say where it lies."""
    if (area := _area()) is None:
        return
    begin, size = area
    text = "\0".join(words).encode()[: size - 1]
    ctypes.memmove(begin, text.ljust(size, b"\0"), size)


def _area() -> tuple[int, int] | None:
    """Address and size of the arguments (proc(5): fields 48 and 49 of `stat`)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return None
    return (begin, end - begin) if 0 < begin < end else None
