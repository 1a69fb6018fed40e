"""The wait of a process that drains: running requests may finish."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

POLL_S = 0.02


async def wait_while(may_wait: Callable[[], bool], *, at_once: asyncio.Event) -> None:
    """Poll until `may_wait` is false; `at_once` ends the wait."""
    while not at_once.is_set() and may_wait():
        await pause(at_once)


async def pause(at_once: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(at_once.wait(), POLL_S)
