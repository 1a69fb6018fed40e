"""Settings that engine libraries read from the environment once, and a way to silence what they print at start."""

import contextlib
import os
from collections.abc import Iterator, Mapping


def set_defaults(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def defaults_inside(settings: Mapping[str, str]) -> Iterator[None]:
    """Set them for a library that reads them inside the block. Later engines and processes do not inherit them."""
    added = [name for name in settings if name not in os.environ]
    set_defaults(settings)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def quiet(*fds: int) -> Iterator[None]:
    """Send what C code writes to `fds` (1: stdout, 2: stderr) to /dev/null inside the block."""
    saved = [(fd, os.dup(fd)) for fd in fds]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in fds:
            os.dup2(null, fd)
        yield
    finally:
        os.close(null)
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
