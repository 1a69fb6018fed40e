"""Ends a process whose loop has stopped turning: a worker that hangs is worse than one that is gone, because its router

still sends it requests. It owns one thread and the time of the last sign of life; it must not know what the loop does.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

EXIT_STATUS = 70  # EX_SOFTWARE: a bug, not an operating error
CHECKS_PER_TIMEOUT = 20
LONGEST_CHECK_S = 1.0


def end_with_stacks(stalled_s: float) -> None:
    """Every thread's stack to stderr, then the end, without asking anybody who may hang."""
    print(
        f"scheduler: the loop has not turned for {stalled_s:.1f} s (--watchdog-timeout); stacks follow", file=sys.stderr
    )
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


class Watchdog:
    """`timeout_s`: a turn that takes longer is a stall; 0 or less: never. `on_stall` gets its length in seconds."""

    def __init__(
        self,
        *,
        timeout_s: float,
        on_stall: Callable[[float], None] = end_with_stacks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._clock = clock
        self._turning_since_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._timeout_s > 0:
            self._thread.start()

    def turning(self) -> None:
        """A turn begins (and the one before has ended)."""
        self._turning_since_s = self._clock()

    def resting(self) -> None:
        """The loop waits for something to do; it may take as long as it likes."""
        self._turning_since_s = None

    def stalled_s(self) -> float | None:
        """How long the present turn takes, when that is too long."""
        since_s = self._turning_since_s
        if since_s is None or self._timeout_s <= 0:
            return None
        taken_s = self._clock() - since_s
        return taken_s if taken_s > self._timeout_s else None

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        check_s = min(LONGEST_CHECK_S, self._timeout_s / CHECKS_PER_TIMEOUT)
        while not self._closed.wait(check_s):
            if (taken_s := self.stalled_s()) is not None:
                self._on_stall(taken_s)
                return
