"""Time in which this process ran. Pure.

Some waits are for bytes that this machine may still hold, in a socket's buffer or in a card. While the machine sleeps or its
hypervisor stops it, the clock runs and the bytes do not move: a wait by the clock would end before they land.
"""

MOST_A_TICK_S = 0.1  # counted between two ticks, which are closer together while anything waits


class RunningTime:
    """Counts the time between ticks, up to `MOST_A_TICK_S` each."""

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._ticked_s: float | None = None

    def tick(self, now_s: float) -> None:
        self._counted_s, self._ticked_s = self.at(now_s), now_s

    def at(self, now_s: float) -> float:
        """Return the seconds counted until now."""
        if self._ticked_s is None:
            return self._counted_s
        return self._counted_s + min(max(0.0, now_s - self._ticked_s), MOST_A_TICK_S)
