"""Picks the workers of an attempt: alive, serving the model, not those that failed the request, in time for its objectives.

Policies (router/choice) choose among several. A request without a worker waits where that may soon change.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from router.admission.admission import Admission
from router.attempts.request import RequestContext, time_given
from router.body import ParsedBody, named_model
from router.choice.policies import Placement, Policy
from router.pool.pool import WorkerPool
from router.pool.probe import ROUNDING_S
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, missing_roles, silent_roles
from service.waiter import Waiter

Placements = tuple[Placement, ...]


@dataclass(eq=False, kw_only=True)
class Picker:
    """`wait_s`: --retry-wait. `silence_s`: --dead-worker-timeout; 0: no limit."""

    table: WorkerTable
    policies: Mapping[Role, Policy]
    admission: Admission
    wait_s: float
    silence_s: float
    clock: Callable[[], float]
    _waiters: list[Waiter] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.table.on_change = self._on_change

    def model_of(self, parsed: ParsedBody, roles: Sequence[Role]) -> str:
        catalogue = self.table.models
        if not catalogue.names:
            return ""
        ready: Iterable[str] = ()
        if catalogue.several:
            ready = (base for base in catalogue.bases if not missing_roles(self.table, roles, base))
        return catalogue.meant(named_model(parsed), ready)

    async def pick_later(self, request: RequestContext) -> Placements | None:
        """Wait for a worker where `pick` has found none: while

        - all workers that the request could go to are silent: up to `silence_s`, and no longer than its client.
        - no worker is alive, and the request has failed already: up to `wait_s`.
        """
        time_s = asyncio.get_running_loop().time
        began_s = time_s()
        while (left_s := self._patience_s(request) - (time_s() - began_s)) > ROUNDING_S:
            await self._change(left_s)
            placements = self.pick(request)
            if placements is not None:
                return placements
        return None

    def pick(self, request: RequestContext) -> Placements | None:
        """Pick one worker of each role by its policy, among those best tried next; None when a role has none. `Refused`."""
        pools = self.pools(request)
        for pool in pools:
            if not pool or pool[0].silent:  # where one is, all are: others would have been preferred
                return None  # before a policy remembers a request that is sent nowhere
        if request.slo is not None and request.failed is None:  # an admitted request is not refused later
            now_s = self.clock()
            pools = [WorkerPool(self.admission.in_time(pool, request, now_s=now_s)) for pool in pools]
        return self.choose(request, pools)

    def pick_for_rest(self, request: RequestContext, *, but: Worker) -> Placement | None:
        """Pick the worker with most room that goes on with what `but` has begun; None: there is no other that answers."""
        pool = WorkerPool([worker for worker in self.pools(request)[-1] if worker is not but])
        if not pool or pool[0].silent:
            return None
        return self.choose(request, [WorkerPool([pool.least_loaded()])])[0]

    def choose(self, request: RequestContext, pools: Iterable[WorkerPool]) -> Placements:
        """Choose one worker of each pool; the policies remember that the request goes there."""
        policies, hints = self.policies, request.hints
        return tuple([policies[pool[0].role].choose(pool, hints) for pool in pools])

    def pools(self, request: RequestContext) -> list[WorkerPool]:
        table, model, now_s, failed = self.table, request.model, self.clock(), request.failed
        pools = [table.ready(role, model, now_s=now_s) for role in request.roles]
        return pools if failed is None else [WorkerPool(failed.best_of(pool)) for pool in pools]

    def missing(self, request: RequestContext) -> list[Role]:
        table, roles, model = self.table, request.roles, request.model
        return missing_roles(table, roles, model) or silent_roles(table, roles, model)

    def _patience_s(self, request: RequestContext) -> float:
        """How long the request may wait in all, in the table's present state."""
        table, roles, model = self.table, request.roles, request.model
        if missing_roles(table, roles, model):
            return self.wait_s if request.failed is not None else 0.0
        if silent_roles(table, roles, model) and all(self.pools(request)):
            return min(self.silence_s or math.inf, time_given(request.headers))
        return 0.0

    async def _change(self, within_s: float) -> None:
        waiter = Waiter()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(within_s if within_s < math.inf else None):
                await waiter.wait()
        except TimeoutError:
            return
        finally:
            self._waiters.remove(waiter)

    def _on_change(self) -> None:
        for waiter in self._waiters:
            waiter.wake()
