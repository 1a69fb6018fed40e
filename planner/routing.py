"""Routing of planned requests: the router's own policies and worker table, with what a router would know.

A request is charged to a worker until the worker ends it, as in router/requests. Block numbers identify prompts, in place
of the text that a router hashes.
"""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from planner.workload import PlannedRequest
from router.choice.chooser import Chooser, make_chooser
from router.choice.policies import RoutingHints, cost_tokens
from router.choice.prefix_keys import BLOCK_TOKENS
from router.config import RouterConfig
from router.pool.pool import WorkerPool
from router.pool.states import Check
from router.pool.worker import Lease, Role, Worker
from router.pool.workers import WorkerTable

SEED = 1
T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class Routing(Generic[T]):
    """`policy`: for the workers that compute prompts. Decode workers use least_load: their caches do not help a prompt."""

    policy: str = "least_load"
    _table: WorkerTable = field(default_factory=WorkerTable)
    _workers: dict[T, Worker] = field(default_factory=dict)
    _chooser: Chooser = field(init=False)

    def __post_init__(self) -> None:
        config = RouterConfig(policy=self.policy, decode_policy="least_load")
        self._chooser = make_chooser(config, draw=random.Random(SEED).randrange)

    def choose(self, role: str, pool: Sequence[T], request: PlannedRequest) -> tuple[T, Lease]:
        by_worker = {self._worker(role, one).worker_id: one for one in pool}
        hints = RoutingHints(
            prompt_tokens=request.input_len, output_tokens=request.output_len, keys=self._keys(request)
        )
        choice = self._chooser.policies[Role(role)].choose(WorkerPool(self._workers[one] for one in pool), hints)
        return by_worker[choice.worker.worker_id], self._table.loads.charge(choice.worker, cost_tokens(choice, hints))

    def release(self, lease: Lease) -> None:
        self._table.loads.release(lease)

    def _worker(self, role: str, one: T) -> Worker:
        if one not in self._workers:
            worker = self._table.add(f"http://planned-{len(self._workers)}:1", role=Role(role))
            self._table.on_check(worker, Check.OK, now_s=0.0)
            self._workers[one] = worker
        return self._workers[one]

    def _keys(self, request: PlannedRequest) -> Sequence[bytes]:
        """A block's number also identifies all blocks before it, so (number, part) is a key of the prefix."""
        if self.policy != "cache_aware":
            return ()
        return [b"%d.%d" % (token, part) for token, count in request.blocks for part in range(count // BLOCK_TOKENS)]
