"""Exempts permanent objects from garbage collection: a full collection of 60,000 takes over 30
ms.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable collections during large imports (a tenth of torch's import time)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_spared_in: list[int] = []  # pids; inherited by forks


def spare_what_lives() -> None:
    """Freeze all objects. A second call collects first, and covers newer ones."""
    if os.getpid() not in _spared_in:
        _spared_in.append(os.getpid())
    else:
        gc.unfreeze()
        gc.collect()
    gc.freeze()
