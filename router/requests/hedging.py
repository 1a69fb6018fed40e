"""Sends a request whose answer does not come to a second pair as well (--hedge-after; composed in only then).

A hedge saves a request from one slow worker, and costs another worker all of its work. So only a share of requests may be
hedged (a bucket that fills with them, as the retry budgets of Finagle and gRPC), and none while requests wait: a pool that is
slow because it is full gets no more work. The idea is Dean's and Barroso's (The Tail at Scale, CACM 2013).
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from router.admission.admission import Admission
from router.attempts.pair_attempt import AttemptGroup, AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.body import BadBody
from router.metrics import RouterMetrics
from router.pool.worker import LoadReport, Worker
from router.requests.picking import Picker

HEDGE_HEADER = "x-tandem-hedge-after-ms"
MAX_SAVED = 10.0  # hedges that a quiet time may leave for a bad one

_QUEUES = ("prealloc", "retracted")  # stages of a decode worker in which requests wait for memory


class Withheld(StrEnum):
    """Why a request that was due was not hedged."""

    BUSY = "busy"  # requests wait for their turn at the router
    NO_OTHER = "no_other"  # every other worker is busy, or there is none
    BUDGET = "budget"


@dataclass(slots=True)
class Budget:
    """Of n requests at most 1 + `share` * n are hedged, at any time."""

    share: float
    _saved: float = 1.0

    def earn(self) -> None:
        """A request came."""
        self._saved = min(MAX_SAVED, self._saved + self.share)

    def spend(self) -> bool:
        """Whether there is enough for one more hedge; then it is taken."""
        enough = self._saved >= 1.0
        self._saved -= enough
        return enough


class HedgeRules:
    """When a request is hedged. Pure. `after_s`: for streams whose request does not name a time."""

    def __init__(self, *, after_s: float, share: float) -> None:
        self._after_s = after_s
        self._budget = Budget(share)

    def after_s(self, headers: Mapping[str, str], *, streams: bool) -> float | None:
        """Return how long this request's answer may keep silent; None: for ever. `BadBody` names the header.

        An answer that is not streamed is silent until it is whole, which says nothing about the speed of its workers: it is
        hedged only if its client says after which time.
        """
        self._budget.earn()
        named_s = read_hedge_after_s(headers)
        return (named_s or None) if named_s is not None else (self._after_s if streams else None)

    def withheld(self, *, waiting: bool, pools: object | None) -> Withheld | None:
        """Return why a request that is due is not hedged; None: it is, and that is paid for. `pools`: of `other_pools`."""
        if waiting:
            return Withheld.BUSY
        if pools is None:
            return Withheld.NO_OTHER
        return None if self._budget.spend() else Withheld.BUDGET


class Hedging:
    """Begins hedges in one router process."""

    def __init__(
        self,
        rules: HedgeRules,
        *,
        picker: Picker,
        launcher: AttemptLauncher,
        admission: Admission,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.rules = rules
        self._picker = picker
        self._launcher = launcher
        self._admission = admission
        self._metrics = metrics
        self._clock = clock

    def arm(self, request: RequestContext, group: AttemptGroup) -> asyncio.TimerHandle | None:
        """Begin a second attempt once the answer has been silent for long enough. A request has one chance."""
        if request.hedge_after_s is None:
            return None
        begin = partial(self._begin, request, group.running[0])
        return asyncio.get_running_loop().call_later(request.hedge_after_s, group.begin_hedge, begin)

    def count(self, group: AttemptGroup, winner: PairAttempt | None) -> None:
        """The attempts of `group` are over, and this one answered."""
        if group.hedge is not None:
            self._metrics.hedges.labels("won" if winner is group.hedge else "lost").inc()

    def _begin(self, request: RequestContext, first: PairAttempt) -> PairAttempt | None:
        request.hedge_after_s = None
        pools = other_pools(self._picker.pools(request), first.workers)
        why = self.rules.withheld(waiting=self._admission.num_waiting > 0, pools=pools)
        if why is not None or pools is None:
            self._metrics.hedges_withheld.labels(why).inc()
            return None
        self._metrics.hedges.labels("started").inc()
        headers = request.headers_at(self._clock())
        return self._launcher.begin(request, headers, self._picker.choose(request, pools), hedge=True)


def read_hedge_after_s(headers: Mapping[str, str]) -> float | None:
    """Read the seconds that a request names, 0: never; None: it names none. `BadBody` names the header."""
    text = headers.get(HEDGE_HEADER)
    if text is None:
        return None
    try:
        value_s = float(text) / 1000
    except ValueError:
        value_s = -1.0
    if not 0.0 <= value_s < math.inf:
        raise BadBody(None, f"{HEDGE_HEADER}: must be a number of milliseconds, 0: no hedge; got {text[:40]!r}")
    return value_s


def other_pools(pools: Sequence[Sequence[Worker]], taken: Sequence[Worker]) -> list[Sequence[Worker]] | None:
    """From each role's pool those where a hedge may go: with no queue, and others than `taken` (one of each role).

    Where a role has only the one that is taken, that one is shared, should it have no queue. None: a role has no worker, or
    all would be the same again.
    """
    free = [[w for w in pool if w not in taken and not has_queue(w.report)] for pool in pools]
    if not any(free):
        return None
    found = [others or _alone(pool, taken) for others, pool in zip(free, pools, strict=True)]
    return list(found) if all(found) else None


def has_queue(report: LoadReport | None) -> bool:
    """Whether requests wait for room at a worker, as it reported last. One that reports nothing is believed to have none."""
    if report is None:
        return False
    return report.waiting_reqs > 0 or any(report.stages.get(stage, 0) for stage in _QUEUES)


def _alone(pool: Sequence[Worker], taken: Sequence[Worker]) -> Sequence[Worker]:
    """The one worker of a role that has no other."""
    return [w for w in pool if len(pool) == 1 and w in taken and not has_queue(w.report)]
