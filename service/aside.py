"""Thread pools for work that would block an event loop.

One call into C keeps the interpreter, so it must be short for the longest input; in between the
loop gets it within `SWITCH_S`.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SWITCH_S = 0.0005  # Python's default of 5 ms, times 16 streams, would show in ITL

T = TypeVar("T")


class Aside:
    """Runs work below `inline` in the loop, from `huge` on in a separate pool."""

    def __init__(self, name: str, *, inline: int, huge: int, threads: int = 1) -> None:
        self._inline = inline
        self._huge = huge
        self._long = ThreadPoolExecutor(threads, name, initializer=_share)
        self._longest = ThreadPoolExecutor(1, f"{name}-huge", initializer=_share)

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """Return the result of `work` on `size` bytes or characters."""
        if size < self._inline:
            return work()
        pool = self._longest if size >= self._huge else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        for pool in (self._long, self._longest):
            pool.shutdown(wait=False, cancel_futures=True)


def _share() -> None:
    sys.setswitchinterval(SWITCH_S)


BODIES = Aside("bodies", inline=128 << 10, huge=1 << 20)  # for request bodies of all servers in the process
