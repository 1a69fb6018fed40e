"""Error codes of kernels, and their exceptions."""

NO_MEMORY, RANKS_ENDED, OUT_OF_STEP = 1, 2, 3  # of all kernels; 0 is success


class RanksEnded(Exception):
    """A rank set the group's abort word: waits for other ranks end."""


def failure(code: int) -> Exception:
    if code == RANKS_ENDED:
        return RanksEnded("a rank of this group has ended")
    if code == OUT_OF_STEP:
        return RuntimeError("ranks are out of step: they add partial results of different sizes")
    return MemoryError("a kernel found no memory")
