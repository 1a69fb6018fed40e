"""Which worker a session belongs to: multi-probe consistent hashing. Pure, and the same in every router.

Each worker has `POINTS` places on a ring of 2^64, by its URL, and each session `PROBES`: the worker whose place follows one of them most
closely has the session. A worker that leaves moves its own sessions only; one that joins only takes. A look-up bisects the ring once a
probe. Appleton, O'Reilly, "Multi-probe consistent hashing" (2015). With these numbers shares differ by 4% (one sigma).
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
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

    def owner(self, session: str) -> int:
        places, count, beyond = self._places, len(self._places), self._places[0] + _SIZE
        best, closest = beyond, _SIZE
        probe, step = _hashes(session, 2)
        for _ in range(PROBES):
            at = bisect_left(places, probe)
            place = places[at] if at < count else beyond
            if place - probe < closest:
                best, closest = place, place - probe
            probe = (probe + step) & _MASK
        return self._owners[best & _MASK]


@lru_cache(maxsize=2 * MAX_WORKERS)
def places_of(url: str) -> tuple[int, ...]:
    return tuple(place for number in range(POINTS // 8) for place in _hashes(f"{number} {url}", 8))


def _hashes(text: str, count: int) -> Sequence[int]:
    """Up to 8 numbers of 64 bits, the same in every process."""
    digest = blake2b(text.encode(errors="replace"), digest_size=_DIGEST * count).digest()
    return struct.unpack(f">{count}Q", digest)
