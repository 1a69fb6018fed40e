"""End of a process with a hanging loop, since a router still sends it requests."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

from engine.loop.turn_clock import TurnClock

log = logging.getLogger(__name__)

EXIT_STATUS = 70  # EX_SOFTWARE: a bug, not an operating error
CHECKS_PER_TIMEOUT = 20
LONGEST_CHECK_S = 5.0
ASKED = signal.SIGUSR1
DUMP_S = 0.5


def end_with_stacks(stalled_s: float, *, found: str = "") -> None:
    why = f"--watchdog-timeout; it {found}" if found else "--watchdog-timeout"
    end_process(f"scheduler: the loop has not turned for {stalled_s:.1f} s ({why})")


def end_process(why: str) -> None:
    """Write `why` and all stacks to stderr, and end at once."""
    print(f"{why}; stacks follow", file=sys.stderr)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


def dump_when_asked() -> None:
    """Write all stacks to stderr on ASKED, even if Python hangs."""
    faulthandler.register(ASKED, file=sys.stderr, all_threads=True)


def dump_of_others(pids: Iterable[int]) -> None:
    """Trigger `dump_when_asked` in processes, and wait."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ASKED)
    time.sleep(DUMP_S)


class Watchdog:
    """`on_stall` receives seconds."""

    def __init__(
        self,
        turns: TurnClock,
        *,
        on_stall: Callable[[float], None] = end_with_stacks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turns = turns
        self._on_stall = on_stall
        self._clock = clock
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._turns.limit_s > 0:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        check_s = min(LONGEST_CHECK_S, self._turns.limit_s / CHECKS_PER_TIMEOUT)
        while not self._closed.wait(check_s):
            if (taken_s := self._turns.stalled_s(self._clock())) is not None:
                self._on_stall(taken_s)
                return
