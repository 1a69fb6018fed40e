"""Timers of transfers: retries, heartbeats, and the time in which this process ran. Pure."""

MOST_A_TICK_S = 0.1  # counted between two ticks, which are closer together while anything waits


class RetryTimer:
    """Waits that double from `first_s` to `longest_s`. `at_s`: when the next try is due; None: none is planned."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.at_s: float | None = None
        self._first_s = self._wait_s = first_s
        self._longest_s = longest_s

    def plan(self, now_s: float) -> None:
        self.at_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._longest_s)

    def due(self, now_s: float) -> bool:
        return self.at_s is not None and now_s >= self.at_s

    def reset(self) -> None:
        self._wait_s = self._first_s


class Heartbeat:
    """The heartbeat of a connected peer: the next ping, and whether it still answers.

    Misses are counted per ping, not by the clock: a stall of our own process, which wakes up with the answers unread, costs
    one miss and declares no living peer silent.
    """

    def __init__(self, *, interval_s: float, max_failures: int, now_s: float) -> None:
        self._interval_s = interval_s
        self._max_failures = max_failures
        self._next_s = now_s + interval_s
        self._misses = 0
        self.seq = 0
        self.message_at_s = now_s

    @property
    def silent(self) -> bool:
        return self._misses > self._max_failures

    @property
    def next_s(self) -> float:
        """Return when the next ping is due."""
        return self._next_s

    def on_message(self, now_s: float) -> None:
        self._misses, self.message_at_s = 0, now_s

    def due(self, now_s: float) -> bool:
        """Return True if a ping is due. Call at least once an interval, after reading all messages."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        self._misses += 1
        self.seq += 1
        return True


class RunningTime:
    """Time in which this process ran: the time between ticks, up to `MOST_A_TICK_S` each.

    While the machine sleeps or its hypervisor stops it, the clock runs, and bytes in its socket buffers or cards do not move.
    """

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._ticked_s: float | None = None

    def tick(self, now_s: float) -> None:
        self._counted_s, self._ticked_s = self.at(now_s), now_s

    def at(self, now_s: float) -> float:
        if self._ticked_s is None:
            return self._counted_s
        return self._counted_s + min(max(0.0, now_s - self._ticked_s), MOST_A_TICK_S)
