"""How far a part is: a bar on a terminal, else a line every 20 s; and the end of a process in which nothing moves."""

import faulthandler
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

LINE_EVERY_S = 20.0
HANG_S = 120.0


class Progress:
    """`keep` is called with the count as often as a line is written, so that a run that is killed leaves what it had.

    A hang ends the process with status 1 and the stacks of all threads: nothing that runs in it could say more.
    """

    def __init__(self, what: str, total: int, keep: Callable[[int], None]) -> None:
        self.done = 0
        self._what = what
        self._total = total
        self._keep = keep
        self._started_s = self._told_s = time.monotonic()
        self._bar = tqdm(total=total or None, desc=what, unit="") if sys.stderr.isatty() else None
        self.moves()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def add(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        if time.monotonic() - self._told_s >= LINE_EVERY_S:
            self._told_s = time.monotonic()
            self._keep(self.done)
            self._say()

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._bar is not None:
            self._bar.close()
        self._say()

    def _say(self) -> None:
        if self._bar is None:
            share = f"/{self._total:,} ({self.done / self._total:.0%})" if self._total else ""
            rate = self.done / max(self.elapsed_s, 1e-9)
            print(f"{self._what}: {self.done:,}{share} inputs, {rate:,.0f}/s, {self.elapsed_s:.0f} s", flush=True)

    def moves(self) -> None:
        """An input is begun, or something was heard of those under way."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
