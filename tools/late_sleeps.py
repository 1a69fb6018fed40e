"""A plugin of pytest that makes every `asyncio.sleep` of the test process late, as on a machine with other work.

usage: python -m pytest -p tools.late_sleeps [tests/FOLDER ...]
"""

import asyncio
from typing import Any

DELAY_S = 0.05

_sleep = asyncio.sleep


async def late_sleep(delay: float, result: Any = None) -> Any:
    """Sleep `DELAY_S` longer; a sleep of 0 only lets other tasks run, and stays as it is."""
    return await _sleep(delay + DELAY_S if delay > 0 else delay, result)


asyncio.sleep = late_sleep  # before the product is imported
