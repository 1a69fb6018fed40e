"""DP attention: when prompts may enter. A step with a prompt on one rank slows the decodes of all, so prompts wait for each other.

DP rank 0 decides after each step, from the rows of all ranks, for the steps behind those that are posted. Passes are steps.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.core.dp_step import Row


class PrefillPolicy(Protocol):
    def allows(self, rows: Sequence[Row]) -> bool:
        """Whether prompts may enter behind the step of `rows`; call it once a step."""


class PrefillDelayer:
    """Lets prompts enter when all ranks have one, or none runs anything. After SGLang's PrefillDelayer.

    Where some have one, these wait for up to `max_delay_passes` - 1 steps, unless a rank that waits uses less than
    `low_watermark` of its KV memory (None: no such rule). Where none has one the gate is closed: the next prompt is in the row of
    its rank first, a step or two before it enters, or it would enter alone.
    """

    def __init__(self, *, max_delay_passes: int = 30, low_watermark: float | None = None) -> None:
        self._most = max_delay_passes - 1
        self._low_watermark = low_watermark
        self._delayed = 0

    def allows(self, rows: Sequence[Row]) -> bool:
        waiting = [row for row in rows if row.prefillable]
        enough = len(waiting) == len(rows) or not any(row.running for row in rows)
        allows = bool(waiting) and (enough or self._delayed >= self._most or any(map(self._has_much_room, waiting)))
        self._delayed = self._delayed + 1 if waiting and not allows else 0
        return allows

    def _has_much_room(self, row: Row) -> bool:
        return self._low_watermark is not None and row.token_usage < self._low_watermark


class ScheduleEnhancer:
    """Holds prompts back while one rank runs all that it may and another does not, for up to `MOST` steps: then all refill together."""

    MOST = 30

    def __init__(self, *, max_running: int) -> None:
        self._max_running = max_running
        self._held = 0

    def allows(self, rows: Sequence[Row]) -> bool:
        running = [row.running for row in rows]
        holds = min(running) < max(running) == self._max_running and self._held < self.MOST
        self._held = self._held + 1 if holds else 0
        return not holds
