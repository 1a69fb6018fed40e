"""Choice of a request's route and workers by its price (router/choice/where.py). Pure.

Candidates are each policy's choice and the worker of its pool with most of the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from router.attempts.request import Slo
from router.choice.policies import SCANNED, Placement, Policy, RoutingHints, cached_of, load_key, worker_in
from router.choice.prefix_index import PrefixIndex, PrefixMatch
from router.choice.where import DEFAULT_BYTES_S, Ask, Candidate, Decision, PageSource, decide, fetch_s
from router.history.forecast import STALE_S, Forecast
from router.pool.worker import Pool, Role, Worker
from service.kv_events import BLOCK_TOKENS

TRY_EVERY = 20  # requests: at most one of so many measures a route that is not the cheapest
MAX_TRIES = 16  # of a route without measurements, while it is idle
TRY_TOKENS = 256
GB = 1e9

Placements = tuple[Placement, ...]
Pools = Sequence[Pool]
NO_SLO = Slo()


class Choice(NamedTuple):
    """`decision`: None if there was one candidate."""

    placements: Placements
    decision: Decision | None = None


@dataclass(slots=True, kw_only=True)
class RouteChooser:
    """`worker_of`: by id. `fixed`: unified workers are the reserve of a fixed route (--route)."""

    policies: Mapping[Role, Policy]
    forecast: Forecast
    worker_of: Callable[[int], Worker | None] = lambda worker_id: None
    index: PrefixIndex | None = None
    fixed: bool = False
    _last: dict[int, str] = field(default_factory=dict)  # last route, by bits of the prompt's length
    _since_try: int = TRY_EVERY  # requests

    def choose(self, ways: Sequence[Pools], hints: RoutingHints, now_s: float, slo: Slo | None = None) -> Choice:
        """Choose among `ways` (non-empty pools by role; one pool: whole requests) and workers."""
        seen: dict[int, Placement] = {}  # by id of the pool
        for pool in [pool for pools in ways for pool in pools]:
            if id(pool) not in seen:
                seen[id(pool)] = self.policies[pool[0].role].look(pool, hints)
        return self.take(ways, [tuple([seen[id(pool)] for pool in pools]) for pools in ways], hints, now_s, slo)

    def take(
        self,
        ways: Sequence[Pools],
        found: Sequence[Placements],
        hints: RoutingHints,
        now_s: float,
        slo: Slo | None,
        *,
        strict: bool = False,
    ) -> Choice:
        """Choose among the policies' choices `found`, and record it. `strict`: of no others."""
        if self.fixed and len(found) > 1:
            kept = [at for at, way in enumerate(found) if way[0].worker.role is not Role.UNIFIED]
            ways, found = [ways[at] for at in kept] or ways, [found[at] for at in kept] or found
        matched = self._match(hints)
        if matched is not None:
            found = self._with_holders([()] * len(ways) if strict else ways, found, hints, matched)
        choice = Choice(found[0]) if len(found) == 1 else self._cheapest(found, hints, now_s, slo or NO_SLO)
        for placement in choice.placements:
            policy = self.policies[placement.worker.role]
            policy.note(placement, hints)
            if self.index is not None and not policy.needs_keys and hints.keys:
                self.index.touch(placement.worker.worker_id, hints.keys)
        return choice

    def _cheapest(self, found: Sequence[Placements], hints: RoutingHints, now_s: float, slo: Slo) -> Choice:
        # of equally dear ones that with fewer requests so far
        found = sorted(found, key=lambda way: sum([one.worker.assigned_total for one in way]))
        workers = {one.worker.worker_id: one.worker for way in found for one in way}
        figures = {worker_id: self.forecast.figures(one) for worker_id, one in workers.items()}
        candidates = [_candidate(way) for way in found]
        ask = Ask(hints.prompt_tokens, self.forecast.answer_tokens(hints.output_tokens), slo.ttft_s, slo.itl_s)
        size = hints.prompt_tokens.bit_length()
        tries = self._tries(found, candidates, hints) if self._since_try >= TRY_EVERY else []
        self._since_try = 1 if tries else self._since_try + 1
        decision = decide(candidates, ask, figures, last=self._last.get(size), tries=tries)
        self._last[size] = decision.chosen.route
        way = found[candidates.index(decision.chosen)]
        self.forecast.note_try(self.forecast.line(way[0].worker, whole=len(way) == 1), now_s)  # one at a time
        return Choice(way, decision)

    def _tries(
        self, found: Sequence[Placements], candidates: Sequence[Candidate], hints: RoutingHints
    ) -> list[Candidate]:
        """Idle, unmeasured routes with nearly as much of the prompt as others."""
        most = TRY_TOKENS + 2 * (hints.prompt_tokens - max([one.cached for one in candidates]))
        lines = [self.forecast.line(way[0].worker, whole=len(way) == 1) for way in found]
        newest_s = max(line.news_s for line in lines)
        return [
            one
            for one, way, line in zip(candidates, found, lines, strict=True)
            if (line.news_s < newest_s - STALE_S if line.is_known else line.num_tries < MAX_TRIES)
            and hints.prompt_tokens - one.cached <= most
            and not any([placement.worker.load_tokens or placement.worker.requests_everywhere for placement in way])
        ]

    # ---- by what workers hold

    def with_pages(self, placements: Sequence[Placement], hints: RoutingHints) -> Sequence[Placement]:
        """With the most pages that each can fetch or read from its store."""
        matched = self._match(hints)
        if matched is None:
            return placements
        ways = [[self._with_store(one, hints, matched), *self._fetching(one, hints, matched)] for one in placements]
        return [max(one, key=lambda way: way.known_tokens) for one in ways]

    def _match(self, hints: RoutingHints) -> PrefixMatch | None:
        matched = self.index.match(hints.keys) if self.index is not None and hints.keys else None
        return matched if matched is not None and matched.groups else None

    def _with_holders(
        self, ways: Sequence[Pools], found: Sequence[Placements], hints: RoutingHints, matched: PrefixMatch
    ) -> list[Placements]:
        """Add workers with most of the prompt, and pages fetched from them."""
        candidates: list[Placements] = []
        for pools, way in zip(ways, found, strict=True):
            firsts = self._with_holder(pools[0] if pools else (), way[0], hints, matched)
            fetching = [one for placement in firsts for one in self._fetching(placement, hints, matched)]
            firsts = [self._with_store(placement, hints, matched) for placement in firsts] + fetching
            if len(way) == 1:
                candidates += [(first,) for first in firsts]
                continue
            lasts = self._with_holder(pools[-1] if pools else (), way[1], hints, matched)
            candidates += [(first, last) for first in firsts for last in lasts]
        return candidates

    def _with_holder(self, pool: Pool, looked: Placement, hints: RoutingHints, matched: PrefixMatch) -> list[Placement]:
        cached = cached_of(matched, looked.worker.worker_id, hints)
        better = _longest(matched, partial(worker_in, pool), hints, above=cached)
        return [Placement(looked.worker, cached), *([] if better is None else [better])]

    def _with_store(self, placement: Placement, hints: RoutingHints, matched: PrefixMatch) -> Placement:
        worker = placement.worker
        found = None if self.index is None else self.index.store_of(worker.worker_id)
        if found is None:
            return placement
        held, store = found
        bytes_s = GB * (0.0 if worker.report is None else worker.report.store_gb_s) or DEFAULT_BYTES_S
        cached, readable = placement.cached_tokens, int(bytes_s * store.wait_s / store.token_bytes)
        missing = min(cached_of(matched, held, hints) - cached, readable)
        if missing < BLOCK_TOKENS:
            return placement
        seconds = fetch_s(missing * store.token_bytes, bytes_s)
        return Placement(worker, cached, PageSource(held, cached + missing, missing, seconds, from_store=True))

    def _fetching(self, placement: Placement, hints: RoutingHints, matched: PrefixMatch) -> list[Placement]:
        """With pages of the worker that has most of the prompt, if that is a block more."""
        worker = placement.worker
        if worker.prefix is None:
            return []

        def giver(worker_id: int) -> Worker | None:
            one = self.worker_of(worker_id)
            return one if one is not None and _may_give(one, worker) else None

        found = _longest(matched, giver, hints)
        if found is None or found.cached_tokens < placement.cached_tokens + BLOCK_TOKENS:
            return []
        return [Placement(worker, placement.cached_tokens, _source(found, placement))]


def _may_give(source: Worker, to: Worker) -> bool:
    return source.prefix is not None and source.answers and not source.leaving and source.model == to.model


def _longest(
    matched: PrefixMatch, worker_of: Callable[[int], Worker | None], hints: RoutingHints, *, above: int = 0
) -> Placement | None:
    """The most tokens of the prompt, if `above`, at the least loaded such worker of `worker_of`."""
    for depth, bits in reversed(matched.groups):
        if depth * BLOCK_TOKENS <= above:
            break
        workers = [one for at in islice(matched.ids(bits), SCANNED) if (one := worker_of(at)) is not None]
        if workers:
            found = [Placement(worker, cached_of(matched, worker.worker_id, hints)) for worker in workers]
            return min(found, key=lambda one: (-one.cached_tokens, load_key(one.worker)))
    return None


def _source(found: Placement, to: Placement) -> PageSource:
    worker, missing = found.worker, found.cached_tokens - to.cached_tokens
    reports = [one.report.transfer_gb_s for one in (worker, to.worker) if one.report is not None]
    assert worker.prefix is not None
    seconds = fetch_s(missing * worker.prefix.token_bytes, GB * max(reports, default=0.0))
    return PageSource(worker.worker_id, found.cached_tokens, missing, seconds)


def _candidate(way: Placements) -> Candidate:
    first, held = way[0], way[-1].cached_tokens
    route = "pair" if len(way) > 1 else first.worker.role.value
    return Candidate(route, tuple([one.worker.worker_id for one in way]), first.cached_tokens, held, first.source)
