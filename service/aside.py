"""Threads for work that would hold an event loop: short work runs at once, long work beside the loop, very long work in a thread of its own.

A thread keeps the interpreter while one call into C runs, so each such call must be short for the longest input that the server admits.
Between calls the loop gets it within `SWITCH_S`.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SWITCH_S = 0.0005  # Python's own 5 ms, once for each of 16 streams, would be a gap that clients see

T = TypeVar("T")


class Aside:
    """`inline`: the loop itself does work below this size. `huge`: from this size on work waits for its like alone."""

    def __init__(self, name: str, *, inline: int, huge: int, threads: int = 1) -> None:
        self._inline = inline
        self._huge = huge
        self._long = ThreadPoolExecutor(threads, name, initializer=_share)
        self._longest = ThreadPoolExecutor(1, f"{name}-huge", initializer=_share)

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """The result of `work`. `size`: of what it works on, in bytes or characters."""
        if size < self._inline:
            return work()
        pool = self._longest if size >= self._huge else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Work that waits does not run any more."""
        for pool in (self._long, self._longest):
            pool.shutdown(wait=False, cancel_futures=True)


def _share() -> None:
    sys.setswitchinterval(SWITCH_S)


BODIES = Aside("bodies", inline=128 << 10, huge=1 << 20)  # bodies of requests, of all servers in the process
