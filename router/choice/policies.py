"""Policies choose a request's worker, named as in SGLang's router (docs/router.md). Pure.

    load of prefill, encode   tokens queued for computation and in no cache
    load of decode, unified   KV of requests at their end, as share of capacity if all report it

Up to `SCANNED` workers are compared, else `DRAWN` random ones, whose best is nearly as lightly
loaded (Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 12(10),
2001; docs/reports/benchmarks.md).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from typing import ClassVar

import msgspec

from router.body import FIRST_RESPONSE_FIELD, ParsedBody
from router.choice.prefix_index import Data, PrefixIndex, PrefixMatch, keyed_prompt
from router.choice.where import PageSource
from router.config import ChoiceFlags
from router.pool.worker import MAX_WORKERS, NO_NAMES, Pool, Role, Worker, worker_id_of
from service.http.errors import decode_or_none
from service.http.guard import MAX_SESSION_CHARS, SESSION_HEADER
from service.kv_events import BLOCK_BYTES, BLOCK_TOKENS
from service.waiter import BODIES

SCANNED = 128
DRAWN = 16
_MASK = (1 << 64) - 1

Draw = Callable[[int], int]  # n -> a random integer in [0, n)
LoadKey = tuple[float, int, int, int]


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """`keys`, of `data`, and `session` are empty if unused."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    keys: Sequence[Hashable] = ()
    data: Data = b""
    session: str = ""


class Placement(msgspec.Struct, frozen=True):
    """A worker, the tokens of the prompt it probably has cached, and where it fetches more."""

    worker: Worker
    cached_tokens: int = 0
    source: PageSource | None = None

    @property
    def known_tokens(self) -> int:  # cached or fetched
        return self.cached_tokens + (0 if self.source is None else self.source.missing)


WithPages = Callable[[Sequence[Placement], RoutingHints], Sequence[Placement]]  # adds pages to fetch


def cost_tokens(choice: Placement, hints: RoutingHints) -> int:
    """A request's load: tokens to compute for prefill, else all its KV."""
    if choice.worker.role is Role.PREFILL:
        return hints.prompt_tokens - choice.known_tokens
    return hints.prompt_tokens + hints.output_tokens


def load_key(worker: Worker) -> LoadKey:
    return (worker.load_tokens, worker.inflight_requests, worker.assigned_total, worker.worker_id)


def share_key(worker: Worker) -> LoadKey:
    return (worker.load_tokens / worker.capacity_tokens, *load_key(worker)[1:])


def key_for(workers: Sequence[Worker]) -> Callable[[Worker], LoadKey]:
    """Order by share if workers hold KV and all report a capacity."""
    by_share = workers[0].role.holds_kv and all([worker.capacity_tokens > 0 for worker in workers])
    return share_key if by_share else load_key


def least_loaded(workers: Sequence[Worker]) -> Worker:
    return workers[0] if len(workers) == 1 else min(workers, key=key_for(workers))


def few_of(pool: Pool, draw: Draw, count: int = DRAWN) -> Pool:
    size = len(pool)
    return pool if size <= SCANNED else [pool[at] for at in sorted({draw(size) for _ in range(count)})]


def worker_in(pool: Pool, worker_id: int) -> Worker | None:
    at = bisect_left(pool, worker_id, key=worker_id_of)
    return pool[at] if at < len(pool) and pool[at].worker_id == worker_id else None


def owner(pool: Pool, name: str) -> Worker:
    """The owner of `name` (a session, an image), the same in every router.

    Rendezvous hashing (Thaler, Ravishankar, IEEE/ACM ToN 1998): the highest hash of name and
    worker.
    """
    number = _hash64(name)
    scores = [number * _odd_hash(worker.url) & _MASK for worker in pool]
    return pool[scores.index(max(scores))]


def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big")


@lru_cache(maxsize=2 * MAX_WORKERS)
def _odd_hash(url: str) -> int:
    return _hash64(url) | 1


@dataclass(eq=False)
class Policy(ABC):
    draw: Draw
    needs_keys: ClassVar[bool] = False  # of prompts
    needs_session: ClassVar[bool] = False

    @abstractmethod
    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        """Choose from `pool` (not empty) without recording it."""

    def note(self, choice: Placement, hints: RoutingHints) -> None:  # noqa: B027 (most have no state)
        """Record that the request is sent there."""

    def some(self, pool: Pool, hints: RoutingHints) -> list[Placement]:
        """Up to `SCANNED` workers (router/history/forecast.py)."""
        return [Placement(worker) for worker in few_of(pool, self.draw, SCANNED)]


class LeastLoad(Policy):
    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(least_loaded(few_of(pool, self.draw)))


class PowerOfTwo(Policy):
    """The less loaded of two random workers, which spreads many routers."""

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        if len(pool) == 1:
            return Placement(pool[0])
        first, second = self.draw(len(pool)), self.draw(len(pool) - 1)
        return Placement(least_loaded((pool[first], pool[second + (second >= first)])))


@dataclass(eq=False)
class RoundRobin(Policy):
    """The next worker by id, so that joins and exits skip none."""

    _last_id: dict[Role, int] = field(default_factory=dict)

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        place = bisect_right(pool, self._last_id.get(pool[0].role, -1), key=worker_id_of)
        return Placement(pool[place % len(pool)])

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        self._last_id[choice.worker.role] = choice.worker.worker_id


class Random(Policy):
    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(pool[self.draw(len(pool))])


class ConsistentHashing(LeastLoad):
    """The session's `owner`; without session by load."""

    needs_session = True

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        return Placement(owner(pool, hints.session)) if hints.session else super().look(pool, hints)


RECOMPUTE_WEIGHT = 4


@dataclass(eq=False)
class CacheAware(Policy):
    """The worker that computes a prompt soonest, given its cached prefix.

        cost(worker) = tokens queued there for prefill - weight * cached tokens of the prompt
        weight       = 1 + RECOMPUTE_WEIGHT * fewest requests at any worker (prefill and unified)

    The weight grows with queues (docs/router.md). In decode a prefix only saves memory and a
    transfer: weight 1. As in SGLang, matches below `cache_threshold` are ignored; beyond both
    balance thresholds only load decides.
    """

    needs_keys = True

    index: PrefixIndex
    flags: ChoiceFlags

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        if not hints.keys:
            return Placement(least_loaded(few_of(pool, self.draw)))
        matched = self.index.match(hints.keys)
        workers = self._few(pool, matched, hints, DRAWN)
        worker = self._soonest(workers, matched, hints)
        return Placement(worker, cached_of(matched, worker.worker_id, hints))

    def some(self, pool: Pool, hints: RoutingHints) -> list[Placement]:
        matched = self.index.match(hints.keys)
        workers = self._few(pool, matched, hints, SCANNED - DRAWN)
        return [Placement(worker, cached_of(matched, worker.worker_id, hints)) for worker in workers]

    def note(self, choice: Placement, hints: RoutingHints) -> None:
        if hints.keys:
            self.index.touch(choice.worker.worker_id, hints.keys)

    def _few(self, pool: Pool, matched: PrefixMatch, hints: RoutingHints, count: int) -> Pool:
        """The pool; of a large one `count` random workers and `DRAWN` longest matches."""
        few = few_of(pool, self.draw, count)
        if len(pool) <= SCANNED or not matched.groups:
            return few
        return sorted({*few, *islice(self._holders(pool, matched, hints), DRAWN)}, key=worker_id_of)

    def _holders(self, pool: Pool, matched: PrefixMatch, hints: RoutingHints) -> Iterator[Worker]:
        start = self.draw(matched.num_places)
        worthy = [bits for depth, bits in reversed(matched.groups) if self._is_worthy(depth, hints)]
        ids = (worker_id for bits in worthy for worker_id in matched.ids(bits, start))
        for worker_id in islice(ids, SCANNED):
            if (worker := worker_in(pool, worker_id)) is not None:
                yield worker

    def _is_worthy(self, depth: int, hints: RoutingHints) -> bool:
        return depth * BLOCK_TOKENS >= self.flags.cache_threshold * hints.prompt_tokens

    def _soonest(self, workers: Pool, matched: PrefixMatch, hints: RoutingHints) -> Worker:
        queues = [worker.inflight_requests for worker in workers]
        shortest = min(queues)
        if not matched.groups or unbalanced(shortest, max(queues), self.flags):
            return least_loaded(workers)
        weight = 1 if workers[0].role is Role.DECODE else 1 + RECOMPUTE_WEIGHT * shortest
        worths = {  # tokens of wait that offset the match, by id
            worker_id: weight * depth * BLOCK_TOKENS
            for depth, bits in matched.groups
            if self._is_worthy(depth, hints)
            for worker_id in matched.ids(bits)
        }

        def cost(worker: Worker) -> LoadKey:
            key = load_key(worker)
            return (key[0] - worths.get(worker.worker_id, 0), *key[1:])

        return min(workers, key=cost)


def unbalanced(shortest: int, longest: int, flags: ChoiceFlags) -> bool:
    return longest - shortest > flags.balance_abs_threshold and longest > flags.balance_rel_threshold * shortest


def cached_of(matched: PrefixMatch, holder: int, hints: RoutingHints) -> int:
    """Cached tokens of the prompt; the last token is always computed."""
    depth = matched.depth(holder)
    tokens = depth * BLOCK_TOKENS + matched.index.behind(holder, hints.keys, depth, hints.data)
    return max(0, min(tokens, hints.prompt_tokens - 1))


# ---- One policy per role, and the hints it needs.

_POLICIES: Mapping[str, type[Policy]] = {  # without an index
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "random": Random,
    "consistent_hashing": ConsistentHashing,
}
# In order of precedence, headers before fields.
SESSION_HEADERS = (SESSION_HEADER, "X-SMG-Routing-Key")
SESSION_FIELDS = ("session_params", "session_id", "routing_key", "prompt_cache_key", "user", FIRST_RESPONSE_FIELD)


class _SessionParams(msgspec.Struct):
    id: str | int | None = None


class Chooser:
    """`index`: of all workers, for `cache_aware` of any role."""

    def __init__(self, policies: Mapping[Role, Policy], index: PrefixIndex | None = None) -> None:
        self.policies, self.index = policies, index
        self.needs_keys = any(policy.needs_keys for policy in policies.values())
        self.needs_session = any(policy.needs_session for policy in policies.values())

    async def hints(
        self, parsed: ParsedBody, headers: Mapping[str, str], event_names: Mapping[str, str], *, size: int
    ) -> RoutingHints:
        """The hints of a body of `size` bytes; a thread reads a long one."""
        if not (self.needs_keys or self.needs_session):
            return RoutingHints(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
        return await BODIES.run(partial(self.hints_of, parsed, headers, event_names), size=size)

    def hints_of(
        self, parsed: ParsedBody, headers: Mapping[str, str], event_names: Mapping[str, str] = NO_NAMES
    ) -> RoutingHints:
        keys, data = keyed_prompt(parsed, event_names) if self.needs_keys else ((), b"")
        return RoutingHints(
            prompt_tokens=parsed.prompt_tokens,
            output_tokens=parsed.output_tokens,
            keys=keys,
            data=data,
            session=session_of(parsed, headers) if self.needs_session else "",
        )

    def forget(self, worker: Worker) -> None:
        if self.index is not None:
            self.index.forget(worker.worker_id)
            self.index.share(worker.worker_id, None)


def make_chooser(flags: ChoiceFlags, *, draw: Draw) -> Chooser:
    names = {
        Role.PREFILL: flags.prefill_policy or flags.default_policy,
        Role.DECODE: flags.decode_policy or flags.default_policy,
        Role.UNIFIED: flags.default_policy,
    }
    simple = {role: _POLICIES[name](draw) for role, name in names.items() if name in _POLICIES}
    if len(simple) == len(names):
        return Chooser(simple)
    index = PrefixIndex(max_blocks=max(1, flags.max_tree_size // BLOCK_BYTES))
    return Chooser({role: simple.get(role) or CacheAware(draw, index, flags) for role in names}, index)


def session_of(parsed: ParsedBody, headers: Mapping[str, str]) -> str:
    named = next((value for name in SESSION_HEADERS if (value := headers.get(name))), "")
    if not named:
        named = next((text for name in SESSION_FIELDS if (text := _session_text(parsed.fields.get(name)))), "")
    return named[:MAX_SESSION_CHARS]


def _session_text(raw: msgspec.Raw | None) -> str:
    value = None if raw is None else decode_or_none(raw, _SessionParams | str | int | None)
    value = value.id if isinstance(value, _SessionParams) else value
    return "" if value is None else str(value)
