"""Exempts permanent objects from garbage collection (30 ms for 60,000)."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


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
