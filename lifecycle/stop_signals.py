"""What signals ask of a process that can drain: the one meaning that SIGTERM and SIGINT have for all of ours.

    serving --SIGTERM--> draining --nothing runs any more, or the time is over--> ended
       |                    |
       +------ SIGINT ------+-- any second signal: at once

Owns what was asked for. Must not know what draining is: routers, workers and the launcher each have their own.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CANNOT = (NotImplementedError, RuntimeError, ValueError)  # this thread, or this system, may handle no signals


class StopSignals:
    """What SIGTERM and SIGINT have asked for so far. `asked`: to end. `at_once`: without waiting for anybody."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def on_sigterm(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def on_sigint(self) -> None:
        self.asked.set()
        self.at_once.set()

    def install(self, *, on_hangup: Callable[[], None] | None = None, only_hangup: bool = False) -> None:
        """From now on the signals come here, SIGHUP to `on_hangup`, as long as the running loop lives.

        `only_hangup`: somebody else says when to end.
        """
        ends = (None, None) if only_hangup else (self.on_sigterm, self.on_sigint)
        loop = asyncio.get_running_loop()
        for number, handler in zip(_NUMBERS, (*ends, on_hangup), strict=True):
            if handler is not None:
                with suppress(*_CANNOT):
                    loop.add_signal_handler(number, handler)

    @contextmanager
    def caught(self, *, on_hangup: Callable[[], None], only_hangup: bool = False) -> Iterator[None]:
        """`install` while inside."""
        self.install(on_hangup=on_hangup, only_hangup=only_hangup)
        try:
            yield
        finally:
            loop = asyncio.get_running_loop()
            for number in _NUMBERS:
                with suppress(*_CANNOT):
                    loop.remove_signal_handler(number)
