"""Which worker gets the next request. Pure. Names follow SGLang's router where it has them (docs/router.md)."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import msgspec

from router.pool.load_order import key_for
from router.pool.pool import Candidates
from router.pool.worker import Role, Worker, worker_id_of


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request that a policy reads. `keys`: of its prompt's prefixes; `session`: "" unknown. Empty if no policy needs them."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    keys: Sequence[Hashable] = ()
    session: str = ""


class Placement(msgspec.Struct, frozen=True):
    """`cached_tokens`: how much of the prompt the worker probably has cached."""

    worker: Worker
    cached_tokens: int = 0


def cost_tokens(choice: Placement, hints: RoutingHints) -> int:
    """Return the load of a request at its worker: for prefill the tokens to compute, else all its KV."""
    if choice.worker.role is Role.PREFILL:
        return hints.prompt_tokens - choice.cached_tokens
    return hints.prompt_tokens + hints.output_tokens


class Policy(ABC):
    @abstractmethod
    def look(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        """Find the one of `candidates` (of one role, at least one) to choose. The request may go elsewhere: remember nothing."""

    def note(self, choice: Placement, hints: RoutingHints) -> None:  # noqa: B027 (most remember nothing)
        """Remember that the request is sent there, as far as the policy remembers anything."""

    def choose(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        """`look` and `note`."""
        choice = self.look(candidates, hints)
        self.note(choice, hints)
        return choice


class LeastLoad(Policy):
    """The least load (router/pool/load_order.py)."""

    def look(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        return Placement(candidates.least_loaded())


@dataclass(frozen=True, slots=True)
class PowerOfTwo(Policy):
    """The less loaded of two random workers: nearly as even, and many routers do not all pick the same one.

    Mitzenmacher, "The power of two choices in randomized load balancing" (1996). `draw(n)`: a random integer in [0, n).
    """

    draw: Callable[[int], int]

    def look(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        if len(candidates) == 1:
            return Placement(candidates[0])
        first, second = self.draw(len(candidates)), self.draw(len(candidates) - 1)
        pair = (candidates[first], candidates[second + (second >= first)])
        return Placement(min(pair, key=key_for(pair)))


class RoundRobin(Policy):
    """The next worker by id after the last one of that role, so that workers that join or leave cause no skips."""

    def __init__(self) -> None:
        self._last_id: dict[Role, int] = {}

    def look(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        last = self._last_id.get(candidates.role, -1)
        place = bisect_right(candidates, last, key=worker_id_of)
        return Placement(candidates[place % len(candidates)])

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        self._last_id[choice.worker.role] = choice.worker.worker_id


@dataclass(frozen=True, slots=True)
class Random(Policy):
    """Uniform. `draw(n)`: a random integer in [0, n)."""

    draw: Callable[[int], int]

    def look(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        return Placement(candidates[self.draw(len(candidates))])


class ConsistentHashing(Policy):
    """A session goes to the same worker in every router (router/pool/ring.py); requests without one go by load."""

    def look(self, candidates: Candidates, hints: RoutingHints) -> Placement:
        if not hints.session:
            return Placement(candidates.least_loaded())
        return Placement(candidates.owner(hints.session))
