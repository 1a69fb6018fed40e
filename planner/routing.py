"""Routing by the router's own policies, prices, worker table and routes.

A request is charged until its end. Block numbers stand for text.
"""

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from planner.workload import Blocks, PlannedRequest
from router.attempts.request import Slo
from router.choice.policies import Chooser, RoutingHints, cost_tokens, make_chooser
from router.config import ROUTES, RouterConfig
from router.history.forecast import Forecast, RunningAnswer, SentPrompt
from router.pool.breaker import Check
from router.pool.worker import Lease, LoadReport, Pool, PrefixHolder, Role, Worker, worker_id_of
from router.pool.workers import WorkerTable
from router.requests.route_choice import RouteChooser
from service.kv_events import BLOCK_BYTES, BLOCK_TOKENS

SEED = 1
ANY = Slo()
REPORT_S = 1.0  # interval of reports (--load-poll-interval)
T = TypeVar("T", bound=Hashable)


@dataclass(slots=True, eq=False)
class Routed(Generic[T]):
    """A request's workers, answering one last, leases, and the source of `num_fetched` tokens."""

    workers: list[T]
    leases: list[Lease]
    prompt: SentPrompt
    source: T | None = None
    num_fetched: int = 0
    answer: RunningAnswer | None = None


@dataclass(slots=True)
class Routing(Generic[T]):
    """`policy`: for prompts; decode of pairs uses least_load. `kv_tokens`: of a worker."""

    policy: str = "least_load"
    route: str = RouterConfig.route
    wanted: Slo = ANY
    kv_tokens: int = 1 << 24
    workers: dict[T, Worker] = field(default_factory=dict)
    _table: WorkerTable = field(default_factory=WorkerTable)
    _forecast: Forecast = field(default_factory=Forecast)
    _chooser: Chooser = field(init=False)
    _routes: RouteChooser = field(init=False)

    def __post_init__(self) -> None:
        decode = self.policy if ROUTES[self.route] else "least_load"
        size = max(1, self.kv_tokens // BLOCK_TOKENS) * BLOCK_BYTES
        config = RouterConfig(policy=self.policy, decode_policy=decode, max_tree_size=size)
        self._chooser = make_chooser(config, draw=random.Random(SEED).randrange)
        self._routes = RouteChooser(
            policies=self._chooser.policies,
            forecast=self._forecast,
            worker_of=self._table.get,
            index=self._chooser.index,
            fixed=self.route != "auto",
        )

    def choose(self, pools: Mapping[str, Sequence[T]], request: PlannedRequest, *, now_s: float) -> Routed[T]:
        hints = RoutingHints(
            prompt_tokens=request.input_len, output_tokens=request.output_len, keys=self._keys(request.blocks)
        )
        by_role = {role: self._pool(role, pool) for role, pool in pools.items() if pool}
        ways: list[tuple[Pool, ...]] = [
            (by_role[role],) for role in ("unified", *ROUTES[self.route]) if role in by_role
        ]
        if self.route in ("auto", "pair") and {"prefill", "decode"} <= by_role.keys():
            ways.append((by_role["prefill"], by_role["decode"]))
        by_id = {worker.worker_id: one for one, worker in self.workers.items()}
        placements = self._routes.choose(ways, hints, now_s, self.wanted).placements
        charge = self._table.loads.charge
        leases = [charge(placement.worker, cost_tokens(placement, hints)) for placement in placements]
        first, whole = placements[0], len(placements) == 1
        begin_s = now_s + (first.source.seconds if first.source else 0.0)  # a fetch is no part of the line
        prompt = self._forecast.expect(first.worker, request.input_len - first.known_tokens, now_s=begin_s, whole=whole)
        routed = Routed([by_id[placement.worker.worker_id] for placement in placements], leases, prompt)
        if first.source is not None:
            routed.source, routed.num_fetched = by_id[first.source.worker_id], first.source.tokens
        return routed

    def on_first_token(self, routed: Routed[T], now_s: float) -> None:
        self._forecast.learn_ttft(routed.prompt, now_s=now_s)
        self._table.loads.on_answer(routed.leases[-1])
        routed.answer = self._forecast.begin_answer(routed.leases[-1].worker, now_s=now_s)

    def on_end(self, routed: Routed[T], num_tokens: int, now_s: float) -> None:
        """Record an answer's end (`num_tokens` 0: failed)."""
        self._forecast.computed(routed.prompt)
        if routed.answer is not None and num_tokens > 1:
            self._forecast.learn_answer(routed.answer, num_tokens - 1, last_s=now_s, now_s=now_s)

    def on_answered(self, routed: Routed[T], request: PlannedRequest) -> None:
        """Learn the answer's pages, as by a KV event."""
        keys = self._keys(request.answered)
        if self._chooser.index is not None:
            self._chooser.index.touch(routed.leases[-1].worker.worker_id, keys)

    def cancel(self, routed: Routed[T]) -> None:
        """Undo `choose`."""
        for lease in routed.leases:
            self.release(lease)
        self._forecast.computed(routed.prompt)

    def on_report(self, one: T, report: LoadReport | None) -> None:
        if one in self.workers:
            self._table.loads.on_report(self.workers[one], report)

    def release(self, lease: Lease) -> None:
        self._table.loads.release(lease)

    def fetches(self, role: str, one: T, *, token_bytes: int) -> None:
        """It gives and takes prefixes."""
        self._worker(role, one).prefix = PrefixHolder("", "", token_bytes)

    def _pool(self, role: str, pool: Sequence[T]) -> Pool:
        return sorted((self._worker(role, one) for one in pool), key=worker_id_of)

    def _worker(self, role: str, one: T) -> Worker:
        if one not in self.workers:
            worker = self._table.add(f"http://planned-{len(self.workers)}:1", role=Role(role))
            self._table.on_check(worker, Check.OK, now_s=0.0)
            self.workers[one] = worker
        return self.workers[one]

    def _keys(self, blocks: Blocks) -> Sequence[Hashable]:
        """Each key identifies all tokens before its end."""
        if self.policy != "cache_aware":
            return ()
        keys, link, parts, missing = list[Hashable](), 0, list[tuple[int, int]](), BLOCK_TOKENS
        for token, count in blocks:
            while count:
                taken = min(count, missing)
                parts.append((token, taken))
                count, missing = count - taken, missing - taken
                if not missing:
                    link = hash((link, *parts))
                    keys.append(link)
                    parts, missing = [], BLOCK_TOKENS
        return keys
