"""Time in which this process ran. Pure: told of the clock.

Some waits are for bytes that this machine may still hold (in a socket's buffer, in a card). When it sleeps or its hypervisor
stops it, the clock goes on and the bytes do not: a wait by the clock would end before they land.
"""

MOST_A_TICK_S = 0.1  # counted between two ticks, which come more often than that while anything is waited for


class RunningTime:
    """Counts up; what the clock did between two ticks counts up to `MOST_A_TICK_S`."""

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._ticked_s: float | None = None

    def tick(self, now_s: float) -> None:
        self._counted_s, self._ticked_s = self.at(now_s), now_s

    def at(self, now_s: float) -> float:
        """Seconds counted until now."""
        if self._ticked_s is None:
            return self._counted_s
        return self._counted_s + min(max(0.0, now_s - self._ticked_s), MOST_A_TICK_S)
