"""Routing by the router's own policies, worker table and routes.

A request is charged until its end. Block numbers stand for text.
"""

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from planner.workload import PlannedRequest
from router.attempts.request import Slo
from router.choice.policies import RoutingHints, cost_tokens, make_chooser
from router.config import RouterConfig
from router.history.forecast import Forecast, SentPrompt
from router.pool.breaker import Check
from router.pool.worker import Lease, LoadReport, Pool, Role, Worker, worker_id_of
from router.pool.workers import WorkerTable
from router.requests.route_choice import RouteChooser
from service.kv_events import BLOCK_TOKENS

SEED = 1
WANTED = Slo(RouterConfig.mixed_ttft_s, RouterConfig.mixed_itl_s)
REPORT_S = 1.0  # interval of reports (--load-poll-interval)
WAYS = (("prefill", "decode"), ("unified",))  # possible routes
T = TypeVar("T", bound=Hashable)


@dataclass(slots=True, eq=False)
class Routed(Generic[T]):
    """A request's workers, answering one last, and leases."""

    workers: list[T]
    leases: list[Lease]
    prompt: SentPrompt | None = None
    first_s: float = 0.0
    requests: int = 0  # at the answering worker at the answer's start


@dataclass(slots=True)
class Routing(Generic[T]):
    """`policy` is for prompts; decode uses least_load. `mixed`: both routes (--mixed)."""

    policy: str = "least_load"
    mixed: bool = False
    wanted: Slo = WANTED
    _table: WorkerTable = field(default_factory=WorkerTable)
    workers: dict[T, Worker] = field(default_factory=dict)
    _forecast: Forecast = field(default_factory=Forecast)
    _ways: RouteChooser = field(init=False)

    def __post_init__(self) -> None:
        config = RouterConfig(policy=self.policy, decode_policy="least_load")
        policies = make_chooser(config, draw=random.Random(SEED).randrange).policies
        self._ways = RouteChooser(policies=policies, forecast=self._forecast, wanted=self.wanted)

    def choose(self, pools: Mapping[str, Sequence[T]], request: PlannedRequest, *, now_s: float) -> Routed[T]:
        hints = RoutingHints(
            prompt_tokens=request.input_len, output_tokens=request.output_len, keys=self._keys(request)
        )
        ways = [[self._pool(role, pools[role]) for role in way] for way in WAYS if all(map(pools.get, way))]
        by_id = {self.workers[one].worker_id: one for pool in pools.values() for one in pool if one in self.workers}
        placements = self._ways.choose(ways, hints, now_s)
        charge = self._table.loads.charge
        leases = [charge(placement.worker, cost_tokens(placement, hints)) for placement in placements]
        routed = Routed([by_id[placement.worker.worker_id] for placement in placements], leases)
        if self.mixed:
            tokens = request.input_len - placements[0].cached_tokens
            routed.prompt = self._forecast.expect(placements[0].worker, tokens, now_s=now_s)
        return routed

    def on_first_token(self, routed: Routed[T], now_s: float) -> None:
        if routed.prompt is not None:
            self._forecast.learn_ttft(routed.prompt, now_s=now_s)
            routed.first_s, routed.requests = now_s, routed.leases[-1].worker.requests_everywhere

    def on_end(self, routed: Routed[T], num_tokens: int, now_s: float) -> None:
        """Record an answer's end (`num_tokens` 0: failed)."""
        if routed.prompt is None:
            return
        self._forecast.computed(routed.prompt)
        if num_tokens > 1:
            worker = routed.leases[-1].worker
            requests = (routed.requests + worker.requests_everywhere) / 2
            self._forecast.learn_answer(worker, num_tokens - 1, now_s - routed.first_s, requests=requests, now_s=now_s)

    def cancel(self, routed: Routed[T]) -> None:
        """Undo `choose`."""
        for lease in routed.leases:
            self.release(lease)
        if routed.prompt is not None:
            self._forecast.computed(routed.prompt)

    def on_report(self, one: T, report: LoadReport | None) -> None:
        if one in self.workers:
            self._table.loads.on_report(self.workers[one], report)

    def release(self, lease: Lease) -> None:
        self._table.loads.release(lease)

    def _pool(self, role: str, pool: Sequence[T]) -> Pool:
        return sorted((self._worker(role, one) for one in pool), key=worker_id_of)

    def _worker(self, role: str, one: T) -> Worker:
        if one not in self.workers:
            worker = self._table.add(f"http://planned-{len(self.workers)}:1", role=Role(role))
            self._table.on_check(worker, Check.OK, now_s=0.0)
            self.workers[one] = worker
        return self.workers[one]

    def _keys(self, request: PlannedRequest) -> Sequence[Hashable]:
        """A block number also identifies earlier blocks."""
        if self.policy != "cache_aware":
            return ()
        return [b"%d.%d" % (token, part) for token, count in request.blocks for part in range(count // BLOCK_TOKENS)]
