"""DP attention: joint entry of prompts, since one rank's prompt slows all ranks' decodes.

DP rank 0 decides after each step.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.core.dp_step import Row


class PrefillPolicy(Protocol):
    def allows(self, rows: Sequence[Row]) -> bool:
        """Return True if prompts may enter after this step; call once per step."""


class PrefillDelayer:
    """Admits prompts when all ranks have one, or none runs anything. After SGLang's PrefillDelayer.

    Others wait up to `max_delay_passes` - 1 steps, unless a waiting rank uses less than
    `low_watermark` of its KV memory. Without prompts the gate is closed, or the next would enter by
    itself.
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
    """Holds prompts up to `MOST` steps while one rank is full and another is not."""

    MOST = 30

    def __init__(self, *, max_running: int) -> None:
        self._max_running = max_running
        self._held = 0

    def allows(self, rows: Sequence[Row]) -> bool:
        running = [row.running for row in rows]
        holds = min(running) < max(running) == self._max_running and self._held < self.MOST
        self._held = self._held + 1 if holds else 0
        return not holds
