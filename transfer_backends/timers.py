"""Timers of transfers: retries, heartbeats, running time. Pure."""

MOST_A_TICK_S = 0.1  # counted between ticks, which are more frequent while anything waits


class RetryTimer:
    """Exponential backoff; `at_s` is the next try."""

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
    """Heartbeat of a peer.

    Misses are counted per ping, not by the clock: a stall of our own process costs one.
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
        return self._next_s

    def on_message(self, now_s: float) -> None:
        self._misses, self.message_at_s = 0, now_s

    def due(self, now_s: float) -> bool:
        """A ping is due. Call once per interval, after reading all messages."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        self._misses += 1
        self.seq += 1
        return True


class RunningTime:
    """Time in which this process ran: between ticks, up to `MOST_A_TICK_S` each.

    The clock also runs while a machine sleeps, and its bytes do not move then.
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
