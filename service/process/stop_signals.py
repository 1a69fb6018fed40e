"""Signals of processes that drain.

    serving --SIGTERM--> draining --idle, or timeout--> ended
       |                    |
       +------ SIGINT ------+-- any second signal: at once

Shells signal whole groups, so our processes use DRAIN and END among themselves, in any number and
order.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

DRAIN, END = signal.SIGUSR1, signal.SIGUSR2  # either ends a process without handlers
TO_GROUPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.02
_CANNOT = (NotImplementedError, RuntimeError, ValueError)  # no handlers in this thread or system


class StopSignals:
    """The requested end: `requested` after a drain, or `at_once`."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.at_once = asyncio.Event()
        self._had_sigterm = False

    def on_sigterm(self) -> None:
        if self._had_sigterm:
            self.at_once.set()
        self._had_sigterm = True
        self.requested.set()

    def on_sigint(self) -> None:
        self.requested.set()
        self.at_once.set()

    @contextmanager
    def caught(self, *, on_hangup: Callable[[], None] | None = None, only_hangup: bool = False) -> Iterator[None]:
        """Handle signals in the context; afterwards ignore them, while the loop closes.

        SIGHUP calls `on_hangup`, or ends if the terminal is gone (not under nohup).
        """
        handlers: dict[signal.Signals, Callable[[], None]] = {}
        if not only_hangup:
            handlers |= {signal.SIGTERM: self.on_sigterm, DRAIN: self.requested.set}
            handlers |= {signal.SIGINT: self.on_sigint, END: self.on_sigint}
        if on_hangup is not None:
            ends = (lambda: False) if only_hangup else hangup_ends()
            handlers[signal.SIGHUP] = partial(self._on_hangup, on_hangup, ends)
        loop = asyncio.get_running_loop()
        for number, handler in handlers.items():
            with suppress(*_CANNOT):
                loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                with suppress(*_CANNOT):
                    loop.remove_signal_handler(number)
                    signal.signal(number, signal.SIG_IGN)

    def _on_hangup(self, then: Callable[[], None], ends: Callable[[], bool]) -> None:
        if ends():
            self.on_sigint()
        else:
            then()


def hangup_ends() -> Callable[[], bool]:
    """Make a check that SIGHUP ends this process: terminal gone, no nohup.

    Call it before SIGHUP has a handler.
    """
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or not _has_terminal()
    return lambda: not outlives and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def wait_while(may_wait: Callable[[], bool], *, at_once: asyncio.Event) -> None:
    """Poll `may_wait` until false, or `at_once`."""
    while not at_once.is_set() and may_wait():
        await pause(at_once)


async def pause(at_once: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(at_once.wait(), POLL_S)
