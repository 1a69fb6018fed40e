"""What SIGTERM and SIGINT mean to every process that can drain.

serving --SIGTERM--> draining --nothing runs any more, or the time is over--> ended
   |                    |
   +------ SIGINT ------+-- any second signal: at once
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.02
_CANNOT = (NotImplementedError, RuntimeError, ValueError)  # this thread, or this system, may handle no signals


class StopSignals:
    """The end that signals requested. `requested`: after a drain. `at_once`: without one."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.at_once = asyncio.Event()

    def on_sigterm(self) -> None:
        if self.requested.is_set():
            self.at_once.set()
        self.requested.set()

    def on_sigint(self) -> None:
        self.requested.set()
        self.at_once.set()

    @contextmanager
    def caught(self, *, on_hangup: Callable[[], None] | None = None, only_hangup: bool = False) -> Iterator[None]:
        """Handle the signals inside the block (SIGHUP: `on_hangup`). Afterwards they are ignored: a closing loop must not be hit."""
        ends = (None, None) if only_hangup else (self.on_sigterm, self.on_sigint)
        handlers = {n: handler for n, handler in zip(_NUMBERS, (*ends, on_hangup), strict=True) if handler is not None}
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


async def wait_while(may_wait: Callable[[], bool], *, at_once: asyncio.Event) -> None:
    """Wait for running requests: poll until `may_wait` is false or `at_once` is set."""
    while not at_once.is_set() and may_wait():
        await pause(at_once)


async def pause(at_once: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(at_once.wait(), POLL_S)
