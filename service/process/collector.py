"""Spares the garbage collector permanent objects (60,000 of a server): a full collection over them takes 30 ms and more."""

import gc


def spare_what_lives() -> None:
    """Call it when everything permanent exists; a second call collects first, then covers newer objects."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    gc.freeze()
