"""How far a part is, and the end of a process in which nothing moves."""

import faulthandler
import time

from tools.progress import progress

HANG_S = 120.0


class Progress:
    """A hang ends the process with status 1 and the stacks of all threads: nothing that runs in it could say more."""

    def __init__(self, what: str, total: int) -> None:
        self.done = 0
        self._started_s = time.monotonic()
        self._bar = progress(total or None, unit="input", what=what)
        self.moves()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def add(self, count: int) -> None:
        self.done += count
        self._bar.update(count)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._bar.close()

    def moves(self) -> None:
        """An input is begun, or something was heard of those under way."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
