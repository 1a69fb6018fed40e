"""What kernels return, and the exceptions that it stands for."""

NO_MEMORY, RANKS_ENDED, OUT_OF_STEP = 1, 2, 3  # of all kernels; 0 is none of them


class RanksEnded(Exception):
    """The group of ranks has ended: a rank set the abort word, and no wait for another rank goes on."""


def failure(code: int) -> Exception:
    """Return the exception for what a kernel returned, which is not 0."""
    if code == RANKS_ENDED:
        return RanksEnded("a rank of this group has ended")
    if code == OUT_OF_STEP:
        return RuntimeError("ranks are out of step: they add partial results of different sizes")
    return MemoryError("a kernel found no memory")
