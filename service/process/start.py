"""Open files, and the end with the parent process."""

import ctypes
import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1


def allow_many_files() -> int:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def die_with_parent(ignored: Sequence[int] = ()) -> Callable[[], None]:
    """A `preexec_fn` for SIGKILL at the end of the calling *thread*."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


# ---- Exempts permanent objects from garbage collection (30 ms for 60,000).


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable collections during large imports (torch: a tenth of the time)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_spared_in: list[int] = []  # pids; inherited by forks


def spare_what_lives() -> None:
    """Freeze all objects; a second call collects first."""
    if os.getpid() not in _spared_in:
        _spared_in.append(os.getpid())
    else:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


# ---- The command line in `ps`: memory of the original arguments, which may be overwritten.

ROOM_BYTES = 2048  # length of an argument to reserve


def set_command_line(words: Sequence[str]) -> None:
    """Set it, cut to the reserved memory."""
    if (area := _area()) is None:
        return
    begin, size = area
    text = "\0".join(words).encode()[: size - 1]
    ctypes.memmove(begin, text.ljust(size, b"\0"), size)


def _area() -> tuple[int, int] | None:
    """Address and size of the arguments (proc(5): fields 48, 49 of `stat`)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return None
    return (begin, end - begin) if 0 < begin < end else None
