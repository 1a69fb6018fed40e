"""Environment settings of engine libraries, and silencing of their start-up output."""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping


def set_defaults(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def defaults_inside(settings: Mapping[str, str]) -> Iterator[None]:
    """For a library that reads them once."""
    added = [name for name in settings if name not in os.environ]
    set_defaults(settings)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def quiet(*fds: int) -> Iterator[None]:
    """C output goes to /dev/null, also in several threads."""
    with _lock:
        for fd in fds:
            _silence(fd)
    try:
        yield
    finally:
        with _lock:
            for fd in fds:
                _unsilence(fd)


_lock = threading.Lock()
_blocks: dict[int, tuple[int, int]] = {}  # by file descriptor: (copy of the original, number of silencing blocks)


def _silence(fd: int) -> None:
    if fd not in _blocks:
        _blocks[fd] = os.dup(fd), 0
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)
    copy, count = _blocks[fd]
    _blocks[fd] = copy, count + 1


def _unsilence(fd: int) -> None:
    """Restore after the last block; a second block's copy would be of /dev/null."""
    copy, count = _blocks[fd]
    if count > 1:
        _blocks[fd] = copy, count - 1
        return
    del _blocks[fd]
    os.dup2(copy, fd)
    os.close(copy)
