"""Which worker a session belongs to: multi-probe consistent hashing. Pure, and the same in every router.

Each worker has `POINTS` places on a ring of 2^64, by its URL, and each session `PROBES`: the worker whose place follows one of them most
closely has the session. A worker that leaves moves its own sessions only; one that joins only takes. A look-up bisects the ring once a
probe. Appleton, O'Reilly, "Multi-probe consistent hashing" (2015). With these numbers shares differ by 4% (one sigma).
"""

import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from router.pool.worker import MAX_WORKERS, Worker

POINTS = 16  # a multiple of 8
PROBES = 21
_SIZE = 1 << 64
_MASK = _SIZE - 1
_DIGEST = 8  # bytes


class HashRing:
    """Two workers have one place once in 10^11 rings of a thousand workers."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._owners = {place: w.worker_id for w in workers for place in places_of(w.url)}
        self._places = sorted(self._owners)

    def add(self, worker: Worker) -> None:
        for place in places_of(worker.url):
            if place not in self._owners:
                insort(self._places, place)
            self._owners[place] = worker.worker_id

    def remove(self, worker: Worker) -> None:
        for place in places_of(worker.url):
            if self._owners.get(place) == worker.worker_id:
                del self._owners[place]
                del self._places[bisect_left(self._places, place)]

    def owner(self, session: str, *, takes: Callable[[int], bool] | None = None) -> int:
        """The id of the worker; of those that `takes` accepts, at least one: of a ring of these alone."""
        best, closest = 0, _SIZE
        probe, step = _hashes(session, 2)
        for _ in range(PROBES):
            place = self._after(probe, takes)
            if place - probe < closest:
                best, closest = place, place - probe
            probe = (probe + step) & _MASK
        return self._owners[best & _MASK]

    def _after(self, probe: int, takes: Callable[[int], bool] | None) -> int:
        """The next place, beyond the end those from the beginning."""
        places, count = self._places, len(self._places)
        at = bisect_left(places, probe)
        while True:
            place = places[at] if at < count else places[at - count] + _SIZE
            if takes is None or takes(self._owners[place & _MASK]):
                return place
            at += 1


@lru_cache(maxsize=2 * MAX_WORKERS)
def places_of(url: str) -> tuple[int, ...]:
    return tuple(place for number in range(POINTS // 8) for place in _hashes(f"{number} {url}", 8))


def _hashes(text: str, count: int) -> Sequence[int]:
    """Up to 8 numbers of 64 bits, the same in every process."""
    digest = blake2b(text.encode(errors="replace"), digest_size=_DIGEST * count).digest()
    return struct.unpack(f">{count}Q", digest)
