"""What the garbage collector need not look at: everything that a process has made by the time it serves.

A server's modules, routes and settings are some 60,000 objects, a scheduler's with torch many more. All of them live as long as the
process, and each full collection walks over all of them, which takes 30 ms and more: tokens wait. SGLang and vLLM do the same.
"""

import gc


def spare_what_lives() -> None:
    """To be called when all that stays is there. Once more: for what has been made since; what died since then goes first."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    gc.freeze()
