"""Picks the workers of an attempt: alive, of the model, not failed before, within the SLO.

Policies choose among workers of a role, prices among routes (route_choice.py). A request without
worker waits if that may soon change.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from router.attempts.request import RequestContext, RequestRefused, Slo
from router.body import ParsedBody, named_model
from router.choice.policies import Placement, Policy, RoutingHints, WithPages, few_of, least_loaded
from router.pool.heartbeats import ROUNDING_S
from router.pool.pairs import fits
from router.pool.worker import Pool, Role, Way, Worker
from router.pool.workers import WorkerTable, missing_roles, silent_roles
from router.requests.route_choice import Choice, Placements, Pools, RouteChooser
from service.http.guard import time_given
from service.waiter import Waiter

# The policy's choice of a pool within the SLO at a time, perhaps for whole requests. Raises RequestRefused.
LookInTime = Callable[[Policy, Pool, RoutingHints, Slo, float, bool, WithPages], Placement]


@dataclass(eq=False, kw_only=True)
class Picker:
    """`wait_s`: --retry-wait. `silence_s`: --dead-worker-timeout, 0 for no limit."""

    table: WorkerTable
    look_in_time: LookInTime
    wait_s: float
    silence_s: float
    clock: Callable[[], float]
    routes: RouteChooser
    _waiters: list[Waiter] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.table.on_change = self._on_change

    def model_of(self, parsed: ParsedBody, ways: Sequence[Way]) -> str:
        catalogue = self.table.models
        if not catalogue.names:
            return ""
        ready: Iterable[str] = ()
        if catalogue.several:
            ready = (base for base in catalogue.bases if not missing_roles(self.table, ways, base))
        return catalogue.meant(named_model(parsed), ready)

    async def pick_later(self, request: RequestContext) -> Placements | None:
        """Wait for a worker after `pick` found none.

        - if all are silent but have not failed it: up to `silence_s`, and its deadline
        - if silent or gone, and it has failed before: up to `wait_s`
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
        """Pick a worker of each role, None if one is missing. Raises RequestRefused."""
        ways: Sequence[Pools] = [
            pools for pools in self.pools(request) if all([pool and not pool[0].silent for pool in pools])
        ]
        if not ways:
            return None  # before a policy records it
        now_s = self.clock()
        if request.slo is not None and request.failed is None:  # retries are not refused
            choice = self._pick_in_time(request, request.slo, ways, now_s)
        else:
            sound = self._sound(request, ways, now_s) if len(ways) > 1 else ways
            choice = self.routes.choose(sound, request.hints, now_s, request.slo)
        request.decision = choice.decision
        return choice.placements

    def pick_for_rest(self, request: RequestContext, *, but: Worker) -> Placement | None:
        """Pick the least loaded responsive worker that fits `but`, other than it."""
        alike = self._narrow(request, self.table.pool(but.role, request.model), self.clock())
        others = [worker for worker in alike if worker is not but and fits(worker, but)]
        if not others or others[0].silent:
            return None
        best = least_loaded(few_of(others, self.routes.policies[but.role].draw))
        return self.routes.take(
            [[[best]]], [(Placement(best),)], request.hints, self.clock(), None, strict=True
        ).placements[0]

    def pools(self, request: RequestContext) -> list[list[Pool]]:
        """Workers of a pool are silent only if all are.

        Pairs have a route for each KV layout.
        """
        table, model, now_s = self.table, request.model, self.clock()
        groups = [group for way in request.ways for group in table.routes(way, model)]
        return [[self._narrow(request, pool, now_s) for pool in group] for group in groups]

    def _narrow(self, request: RequestContext, pool: Pool, now_s: float) -> Pool:
        ready = self.table.ready(pool, now_s=now_s)
        return ready if request.failed is None else request.failed.best_of(ready)

    def missing(self, request: RequestContext) -> list[Role]:
        table, ways, model = self.table, request.ways, request.model
        return missing_roles(table, ways, model) or silent_roles(table, ways, model)

    def _pick_in_time(self, request: RequestContext, slo: Slo, ways: Iterable[Pools], now_s: float) -> Choice:
        """Raises RequestRefused."""
        found: list[tuple[Pools, Placements]] = []
        refused: RequestRefused | None = None
        look, hints, more = self.look_in_time, request.hints, self.routes.with_pages
        for pools in ways:
            whole = len(pools) == 1
            try:
                way = [look(self.routes.policies[pool[0].role], pool, hints, slo, now_s, whole, more) for pool in pools]
            except RequestRefused as error:
                refused = refused or error
            else:
                found.append((pools, tuple(way)))
        if refused is not None and not found:
            raise refused
        sound = self._sound(request, [pools for pools, _ in found], now_s)
        placements = [way for pools, way in found if any([pools is one for one in sound])]
        return self.routes.take(sound, placements, hints, now_s, slo, strict=True)

    def _sound(self, request: RequestContext, ways: Sequence[Pools], now_s: float) -> Sequence[Pools]:
        """Routes without failed workers or open circuits, else all.

        The first of a pool represents it.
        """

        def is_sound(worker: Worker) -> bool:
            failed = request.failed is not None and request.failed.has_failed(worker)
            return not failed and self.table.trusts(worker, now_s=now_s)

        return [pools for pools in ways if all(is_sound(pool[0]) for pool in pools)] or ways

    def _patience_s(self, request: RequestContext) -> float:
        table, ways, model = self.table, request.ways, request.model
        if missing_roles(table, ways, model):
            return self.wait_s if request.failed is not None else 0.0
        if silent_roles(table, ways, model) and any(self._may_wait(request, pools) for pools in self.pools(request)):
            longest_s = self.silence_s or math.inf
            return min(longest_s if request.failed is None else self.wait_s, time_given(request.headers))
        return 0.0

    def _may_wait(self, request: RequestContext, pools: Pools) -> bool:
        """Return whether a complete route has no silent worker that failed the request."""
        failed = request.failed
        return all(pool and (failed is None or not (pool[0].silent and failed.has_failed(pool[0]))) for pool in pools)

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
