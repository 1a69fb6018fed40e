"""Choice of hot prefixes to copy to a second worker, within a budget. Pure.

Hot: `HOT_HITS` requests (half-life `HALF_LIFE_S`) while one worker has it. A copy may overdraw the
budget; the next waits until it is paid back.
"""

from collections import OrderedDict
from collections.abc import Hashable

HOT_HITS = 6.0
HALF_LIFE_S = 30.0
PAUSE_S = 30.0  # between two copies of the same prefix
MOST_AT_ONCE = 2
MOST_KEPT = 4096  # prefixes whose hits are counted


class Replication:
    def __init__(self, *, bytes_a_s: float) -> None:
        self._bytes_a_s = bytes_a_s
        self._hits: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # (hits, time), least recent first
        self._last_s: dict[Hashable, float] = {}  # start of running and recent copies
        self._account = 0.0
        self._paid_s = 0.0
        self.num_running = 0
        self.num_copied = self.num_failed = 0

    def note(self, key: Hashable, now_s: float) -> bool:
        """Count a request; return whether its prefix is hot."""
        hits, at_s = self._hits.pop(key, (0.0, now_s))
        hits = hits * 0.5 ** ((now_s - at_s) / HALF_LIFE_S) + 1.0
        self._hits[key] = hits, now_s
        if len(self._hits) > MOST_KEPT:
            self._hits.popitem(last=False)
        return bool(hits >= HOT_HITS)

    def begin(self, key: Hashable, size_bytes: int, now_s: float) -> bool:
        """Charge a copy, if allowed now; then `end` must follow."""
        self._account = min(0.0, self._account + (now_s - self._paid_s) * self._bytes_a_s)
        self._paid_s = now_s
        self._last_s = {other: at_s for other, at_s in self._last_s.items() if now_s - at_s < PAUSE_S}
        if self.num_running >= MOST_AT_ONCE or self._account < 0.0 or key in self._last_s:
            return False
        self._last_s[key] = now_s
        self._account -= size_bytes
        self.num_running += 1
        return True

    def end(self, *, good: bool) -> None:
        assert self.num_running > 0
        self.num_running -= 1
        self.num_copied += good
        self.num_failed += not good
