"""Spares the garbage collector permanent objects (60,000 of a server): a full collection over them takes 30 ms and more."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Import large libraries inside the block: what they make lives to the end (torch's import collects 365 times: a tenth of it)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_spared_in: list[int] = []  # processes, the last of which may be this one: a fork keeps what its server has spared


def spare_what_lives() -> None:
    """Call it when everything permanent exists; a second call collects first, then covers newer objects."""
    if os.getpid() not in _spared_in:
        _spared_in.append(os.getpid())
    else:
        gc.unfreeze()
        gc.collect()
    gc.freeze()
