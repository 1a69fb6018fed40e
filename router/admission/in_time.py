"""The workers of a pool that would keep a request's objectives, without a look at each. Pure.

A policy chooses from the whole pool first. Its worker is nearly always in time; if not, the policy chooses again without it, a few
times, and then from `InTime`, which goes by headroom (headroom.py). If no worker is in time, the one whose line was measured longest ago is
tried, as it may be faster now. Else the request is refused.

Workers that are late still count in two places: queue lengths, by which cache_aware weighs a cache, and the two workers that
`power_of_two` compares.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from router.admission.forecast import STALE_S, Forecast, LineFit
from router.admission.headroom import HeadroomOrder
from router.admission.queue import RequestRefused
from router.attempts.request import Slo
from router.choice.policies import Placement, Policy, RoutingHints
from router.pool.load_order import LoadKey, LoadOrder, load_key, share_key
from router.pool.pool import NoneInTime, Pool, WorkerPool
from router.pool.worker import Role, Worker

TRIES = 4  # choices from the whole pool
_NAMES = {"ttft": "the first token", "itl": "the time between tokens"}


@dataclass(frozen=True, slots=True)
class Objective:
    """`what`: "ttft" or "itl". `size`: of the request, in tokens or in requests, with nothing cached."""

    what: str
    wanted_s: float
    size: float
    forecast: Forecast

    def fit(self, worker: Worker) -> LineFit:
        return self.forecast.fits(worker)[self.what == "itl"]

    def there(self, worker: Worker) -> int:
        """Return the worker's load in the unit of `size`."""
        return self.forecast.waiting_tokens(worker) if self.what == "ttft" else worker.requests_everywhere

    def left(self, cached_tokens: int) -> float:
        return self.size - cached_tokens if self.what == "ttft" else self.size

    def predicted_s(self, worker: Worker, cached_tokens: int) -> float | None:
        """None: nothing is known."""
        return self.fit(worker).at(self.there(worker) + self.left(cached_tokens))

    def keeps(self, worker: Worker, cached_tokens: int) -> bool:
        at_s = self.predicted_s(worker, cached_tokens)
        return at_s is None or at_s <= self.wanted_s

    def is_stale(self, worker: Worker, now_s: float) -> bool:
        return now_s - self.fit(worker).news_s >= STALE_S

    def headroom(self, worker: Worker) -> float:
        fit = self.fit(worker)
        if not fit.is_known:
            return math.inf
        spare_s, slope = self.wanted_s - fit.intercept, fit.slope
        if slope > 0:
            return spare_s / slope - self.there(worker)
        return math.inf if spare_s >= 0 else -math.inf

    def order(self, pool: Pool, key: Callable[[Worker], LoadKey]) -> HeadroomOrder:
        order: HeadroomOrder = pool.derived((self.what, self.wanted_s, key), partial(self._make, key=key))
        order.catch_up()
        return order

    def by_news(self, pool: Pool) -> Iterator[Worker]:
        """The one that was measured longest ago first."""
        order: LoadOrder = pool.derived((self.what, "news"), self._by_news)
        order.catch_up()
        return order.walk()

    def _make(self, pool: WorkerPool, *, key: Callable[[Worker], LoadKey]) -> HeadroomOrder:
        return HeadroomOrder(pool, also=self.forecast.log, headroom=self.headroom, key=key)

    def _by_news(self, pool: WorkerPool) -> LoadOrder:
        def key(worker: Worker) -> LoadKey:
            return (self.fit(worker).news_s, 0, 0, worker.worker_id)

        return LoadOrder(pool, pool.by_id, pool.log, key, also=self.forecast.log)

    def refusal(self, predicted_s: float) -> RequestRefused:
        what, wanted_s = self.what, self.wanted_s
        message = (
            f"{_NAMES[what]} would take about {predicted_s * 1000:.0f} ms, more than the {wanted_s * 1000:.0f} ms asked for "
            f"(--slo-{what}-ms, X-SLO-{what.upper()}-ms); try again later"
        )
        retry_after_s = max(1, math.ceil(min(60.0, predicted_s - wanted_s)))
        return RequestRefused(message, why=f"slo_{what}", retry_after_s=retry_after_s)


def objectives_of(slo: Slo, role: Role, hints: RoutingHints, forecast: Forecast) -> list[Objective]:
    """Return the objectives that depend on a worker of this role."""
    found = []
    if role is not Role.DECODE and slo.ttft_s < math.inf:
        found.append(Objective("ttft", slo.ttft_s, hints.prompt_tokens, forecast))
    if role is not Role.PREFILL and slo.itl_s < math.inf:
        found.append(Objective("itl", slo.itl_s, 1, forecast))
    return found


def look_in_time(
    policy: Policy, pool: Pool, hints: RoutingHints, objectives: Sequence[Objective], *, now_s: float
) -> Placement:
    """The policy's choice among the workers that keep all objectives. `RequestRefused`: none does."""
    late: set[int] = set()
    while len(late) < min(TRIES, len(pool)):
        choice = policy.look(pool.without(late), hints)
        if all([objective.keeps(choice.worker, choice.cached_tokens) for objective in objectives]):
            return choice
        late.add(choice.worker.worker_id)
    try:
        return policy.look(InTime(pool, objectives), hints)
    except NoneInTime:
        return _one_to_try(policy, pool, hints, objectives, now_s)


def _one_to_try(
    policy: Policy, pool: Pool, hints: RoutingHints, objectives: Sequence[Objective], now_s: float
) -> Placement:
    """The worker that was measured longest ago, if that is long. It is tried once: one request is enough."""
    for objective in objectives:
        for worker in objective.by_news(pool):
            if not objective.is_stale(worker, now_s):
                break
            choice = policy.look(WorkerPool([worker]), hints)
            missed = [one for one in objectives if not one.keeps(worker, choice.cached_tokens)]
            if worker in pool and all([one.is_stale(worker, now_s) for one in missed]):
                for one in missed:
                    one.forecast.note_try(one.fit(worker), now_s)
                return choice
    raise _refusal(policy, pool, hints, objectives)


def _refusal(policy: Policy, pool: Pool, hints: RoutingHints, objectives: Sequence[Objective]) -> RequestRefused:
    """Return a refusal that names the time at the worker nearest to the objective, by its headroom."""
    for objective in objectives:
        workers = [worker for worker in objective.order(pool, load_key).most() if worker in pool]
        nearest = [*workers[:1], policy.look(pool, hints).worker]
        times_s = []
        for worker in nearest:
            cached_tokens = policy.look(WorkerPool([worker]), hints).cached_tokens
            if not objective.keeps(worker, cached_tokens):
                times_s.append(objective.predicted_s(worker, cached_tokens) or 0.0)
        if len(times_s) == len(nearest):
            return objective.refusal(min(times_s))
    return objectives[-1].refusal(objectives[-1].wanted_s)


@dataclass(eq=False)
class InTime:
    """The workers of `pool` that keep `objectives`. Raises `NoneInTime` when one is chosen and none is in time."""

    pool: Pool
    objectives: Sequence[Objective]
    by_cache: bool = field(init=False)

    def __post_init__(self) -> None:
        self.by_cache = any(objective.what == "ttft" for objective in self.objectives)

    @property
    def role(self) -> Role:
        return self.pool.role

    @cached_property
    def _members(self) -> list[Worker]:
        found = sorted(self.in_order(), key=lambda worker: worker.worker_id)
        if not found:
            raise NoneInTime
        return found

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, place: int) -> Worker:
        return self._members[place]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._members)

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and self.member(worker.worker_id) is worker

    def member(self, worker_id: int, *, cached_tokens: int = 0) -> Worker | None:
        worker = self.pool.member(worker_id)
        return worker if worker is not None and self._keeps(worker, cached_tokens) else None

    def in_order(self, *, cached_tokens: int = 0) -> Iterator[Worker]:
        return self._by(load_key, cached_tokens)

    def least_loaded(self) -> Worker:
        if self.role is not Role.PREFILL:
            worker = next(self._by(share_key, 0), None)
            if worker is not None and worker.capacity_tokens > 0:
                return worker
        worker = next(self.in_order(), None)
        if worker is None:
            raise NoneInTime
        return worker

    def queue_ends(self) -> tuple[int, int]:
        return self.pool.queue_ends()

    def owner(self, session: str) -> Worker:
        return WorkerPool(self._members).owner(session)

    def _by(self, key: Callable[[Worker], LoadKey], cached_tokens: int) -> Iterator[Worker]:
        objective = self.objectives[0]
        order, pool = objective.order(self.pool, key), self.pool
        walk = order.walk(objective.left(cached_tokens))
        return (worker for worker in walk if worker in pool and self._keeps(worker, cached_tokens))

    def _keeps(self, worker: Worker, cached_tokens: int) -> bool:
        return all([objective.keeps(worker, cached_tokens) for objective in self.objectives])
