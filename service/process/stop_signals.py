"""What SIGTERM and SIGINT mean to every process that can drain, and the signals by which one process ends another.

serving --SIGTERM--> draining --nothing runs any more, or the time is over--> ended
   |                    |
   +------ SIGINT ------+-- any second signal: at once

A shell, a terminal or a service manager may send these to a whole group of processes. So a process ends those that it has started by
DRAIN and END instead: each has one meaning, however often it comes, and in whichever order with signals to the group.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

DRAIN, END = signal.SIGUSR1, signal.SIGUSR2  # a process that does not handle them yet is ended by either
TO_GROUPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.02
_CANNOT = (NotImplementedError, RuntimeError, ValueError)  # this thread, or this system, may handle no signals


class StopSignals:
    """The end that signals requested. `requested`: after a drain. `at_once`: without one."""

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
        """Handle the signals inside the block. Afterwards they are ignored: a closing loop must not be hit.

        SIGHUP is `on_hangup`, or the end where the terminal of this process is gone, unless it was started to outlive that (nohup).
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
    """Return what says of a SIGHUP whether it ends this process: its terminal is gone, and it was not started to outlive that (nohup).

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
    """Wait for running requests: poll until `may_wait` is false or `at_once` is set."""
    while not at_once.is_set() and may_wait():
        await pause(at_once)


async def pause(at_once: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(at_once.wait(), POLL_S)
