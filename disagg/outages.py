"""Which bootstrap servers refuse connections, and since when. Pure: told of look-ups and of the time; callers lock.

A server that refuses may be starting again, so it gets `grace_s`; after that every look-up there is in vain at once, until one
is answered, or nobody asked for `GAP_S`. One that is merely silent is not refusing: it may be behind a network that heals.
"""

from dataclasses import dataclass, field

GAP_S = 2.0  # rooms ask again every 0.5 s: whoever comes after such a gap finds out anew
MAX_SERVERS = 4096


@dataclass(slots=True)
class Outages:
    grace_s: float
    _runs: dict[str, tuple[float, float]] = field(default_factory=dict)  # server -> (first, last refusal), latest last

    def __len__(self) -> int:
        return len(self._runs)

    def refused(self, server: str, now_s: float) -> float | None:
        """A look-up was refused. How long that has gone on, in seconds, if that is too long; else None."""
        first_s, last_s = self._runs.pop(server, (now_s, now_s))
        if now_s - last_s > GAP_S:
            first_s = now_s
        self._runs[server] = (first_s, now_s)
        if len(self._runs) > MAX_SERVERS:
            del self._runs[next(iter(self._runs))]
        return now_s - first_s if now_s - first_s >= self.grace_s else None

    def answered(self, server: str) -> None:
        """It is there again, whatever it said."""
        self._runs.pop(server, None)
