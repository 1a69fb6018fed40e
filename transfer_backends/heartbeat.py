"""Whether a connected peer still answers, and when to ping it. Pure.

Misses are counted per ping, not measured as elapsed time: a stall of our own process, which wakes up with the peer's answers
unread, then costs one miss at most and never declares a living peer silent.
"""


class Heartbeat:
    def __init__(self, *, interval_s: float, max_failures: int, now_s: float) -> None:
        self._interval_s = interval_s
        self._max_failures = max_failures
        self._next_s = now_s + interval_s
        self._misses = 0
        self.seq = 0

    @property
    def silent(self) -> bool:
        return self._misses > self._max_failures

    def on_message(self) -> None:
        self._misses = 0

    def due(self, now_s: float) -> bool:
        """Return True if a ping is due. Call at least once an interval, after reading all messages."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        self._misses += 1
        self.seq += 1
        return True
