"""Which worker gets the next request. Pure: candidates, what is known of the request, and randomness are given.

Ties are broken by an explicit key. Names are those of SGLang's router where it has them (docs/router.md).
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from router.choice.load import comparable_by_share, least_loaded, load_key
from router.pool.workers import Role, Worker

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know of a request. `keys`: of its prompt's prefixes; `session`: whose it is, "" unknown.

    Both are left empty where no policy asks for them.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    keys: Sequence[bytes] = ()
    session: str = ""


class Choice(msgspec.Struct, frozen=True):
    """`cached_tokens`: of the prompt, that the worker has already, as far as we know."""

    worker: Worker
    cached_tokens: int = 0


class Policy(Protocol):
    def choose(self, candidates: Sequence[Worker], ask: Ask) -> Choice:
        """One of `candidates` (all of one role, at least one); it is going to be sent there."""

    def forget(self, worker: Worker) -> None:
        """This worker left, or lost what it knew."""


class Stateless:
    """A policy that remembers nothing of workers."""

    def forget(self, worker: Worker) -> None:
        return


class LeastLoad(Stateless):
    """Fewest tokens (router/choice/load.py); then fewest requests; then the fewest so far; then the oldest."""

    def choose(self, candidates: Sequence[Worker], ask: Ask) -> Choice:
        return Choice(least_loaded(candidates))


class PowerOfTwo(Stateless):
    """Of two workers drawn at random the less loaded: nearly as even, and many routers do not all pick the same one.

    Mitzenmacher, "The power of two choices in randomized load balancing" (1996). `draw(n)`: a random integer in [0, n).
    """

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def choose(self, candidates: Sequence[Worker], ask: Ask) -> Choice:
        if len(candidates) == 1:
            return Choice(candidates[0])
        first, second = self._draw(len(candidates)), self._draw(len(candidates) - 1)
        pair = (candidates[first], candidates[second + (second >= first)])
        by_share = comparable_by_share(pair)
        return Choice(min(pair, key=lambda worker: load_key(worker, by_share=by_share)))


class RoundRobin(Stateless):
    """The next worker by id after the last one chosen of that role, so that joining and leaving workers skip no one."""

    def __init__(self) -> None:
        self._last_id: dict[Role, int] = {}

    def choose(self, candidates: Sequence[Worker], ask: Ask) -> Choice:
        ordered = sorted(candidates, key=lambda w: w.worker_id)
        last = self._last_id.get(ordered[0].role, -1)
        chosen = next((w for w in ordered if w.worker_id > last), ordered[0])
        self._last_id[chosen.role] = chosen.worker_id
        return Choice(chosen)


class Random(Stateless):
    """Uniform. `draw(n)` returns a random integer in [0, n)."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def choose(self, candidates: Sequence[Worker], ask: Ask) -> Choice:
        return Choice(candidates[self._draw(len(candidates))])


class ConsistentHashing(Stateless):
    """A session always goes to the same worker; requests without one go by load.

    Rendezvous hashing (Thaler, Ravishankar 1998): the worker whose hash with the session is the highest. One of n
    workers that leaves moves its own sessions only, to all others evenly; one that joins takes 1/n from each. Workers
    are told apart by URL, so that all routers agree.
    """

    def choose(self, candidates: Sequence[Worker], ask: Ask) -> Choice:
        if not ask.session:
            return Choice(least_loaded(candidates))
        session = hash64(ask.session)
        return Choice(max(candidates, key=lambda worker: (_score(hash64(worker.url), session), worker.url)))


@lru_cache(maxsize=1 << 14)
def hash64(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def _score(worker: int, session: int) -> int:
    """Hash of the two: multiply and fold, twice (after splitmix64), so that every bit of both reaches every other."""
    mixed = ((worker ^ session) * _MIX) & _MASK
    mixed = ((mixed ^ mixed >> 32) * _MIX) & _MASK
    return mixed ^ mixed >> 29
