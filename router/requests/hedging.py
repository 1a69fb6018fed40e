"""Sends a request whose answer does not come to a second pair as well (--hedge-after; composed in only then).

A hedge costs another worker all of its work, so only a share of requests is hedged (a bucket that fills with them, as the retry budgets
of Finagle and gRPC), and none while requests wait. The idea is Dean's and Barroso's (The Tail at Scale, CACM 2013).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from router.admission.admission import Admission
from router.attempts.pair_attempt import AttemptGroup, AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext, milliseconds
from router.metrics import RouterMetrics
from router.pool.pool import EMPTY, Pool
from router.pool.worker import Worker
from router.requests.picking import Picker

HEDGE_HEADER = "x-tandem-hedge-after-ms"
MAX_SAVED = 10.0  # hedges that a quiet time may leave for a bad one


@dataclass(slots=True)
class Budget:
    """Allows 1 + `share` * n hedges in n requests, at any time."""

    share: float
    _saved: float = 1.0

    def earn(self) -> None:
        self._saved = min(MAX_SAVED, self._saved + self.share)

    def spend(self) -> bool:
        """Pay for one more hedge; False: not enough is saved."""
        enough = self._saved >= 1.0
        self._saved -= enough
        return enough


@dataclass(eq=False, kw_only=True)
class Hedging:
    default_s: float
    budget: Budget
    picker: Picker
    launcher: AttemptLauncher
    admission: Admission
    metrics: RouterMetrics

    def after_s(self, headers: Mapping[str, str], *, streams: bool) -> float | None:
        """Return the silence after which an answer is hedged; None: never, as an answer without a stream is silent to its end."""
        self.budget.earn()
        named_s = milliseconds(headers, HEDGE_HEADER, zero="no hedge")
        if named_s is None:
            return self.default_s if streams else None
        return named_s or None

    def arm(self, request: RequestContext, group: AttemptGroup) -> asyncio.TimerHandle | None:
        """Begin a second attempt once the answer has been silent for long enough. A request has one chance."""
        if request.hedge_after_s is None:
            return None
        begin = partial(self._begin, request, group.running[0])
        return asyncio.get_running_loop().call_later(request.hedge_after_s, group.begin_hedge, begin)

    def count(self, group: AttemptGroup, winner: PairAttempt | None) -> None:
        if group.hedge is not None:
            self.metrics.hedges.labels("won" if winner is group.hedge else "lost").inc()

    def _begin(self, request: RequestContext, first: PairAttempt) -> PairAttempt | None:
        request.hedge_after_s = None
        ways = [others for pools in self.picker.pools(request) if (others := other_pools(pools, first.workers))]
        if self.admission.queue.num_waiting > 0 or not ways or not self.budget.spend():
            why = "busy" if self.admission.queue.num_waiting > 0 else "budget" if ways else "no_other"
            self.metrics.hedges_withheld.labels(why).inc()
            return None
        self.metrics.hedges.labels("started").inc()
        headers = request.headers_at(self.launcher.clock())
        return self.launcher.begin(request, headers, self.picker.choose(request, ways), hedge=True)


def other_pools(pools: Sequence[Pool], taken: Sequence[Worker]) -> list[Pool] | None:
    """Return the workers of each role that may take a hedge: without a queue, and none of `taken` (the first attempt's).

    The only worker of a role is shared. None: a role has no worker, or all would be the same again.
    """
    free = [pool.queueless for pool in pools]
    others = [pool.without({worker.worker_id for worker in taken}) for pool in free]
    if not any(others):
        return None
    found = [
        other or (left if len(pool) == 1 else EMPTY) for other, left, pool in zip(others, free, pools, strict=True)
    ]
    return found if all(found) else None
