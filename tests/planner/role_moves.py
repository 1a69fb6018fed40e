"""The router's controller over a planned cluster: what `--auto-roles` would do there.

The load reports (`/v1/loads` JSON of the real loop, read by router/pool/reports.py), the worker table, the gauge and the
controller are production code. The switch is a model: the worker drains, is away for `switch_s`, and comes back with an
empty cache.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.frontend.apis.admin.load import v1_loads_entry
from engine.messages import GetState, StateReply
from planner.cluster import PlannedCluster
from planner.worker import PlanWorker
from planner.workload import Lengths, PlannedRequest
from router.config import AutoRolesFlags
from router.pool.breaker import Check
from router.pool.reports import parse_load
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.roles.controller import Controller, Gauge, Move

MODEL = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPhase:
    """`count` requests with Poisson arrivals; `gap`: mean gap, in mean gaps of the workload."""

    lengths: Lengths
    count: int
    gap: float = 1.0


def from_phases(phases: Sequence[WorkloadPhase], *, seed: int) -> list[PlannedRequest]:
    """Return the requests of one phase after the other, such as day and night."""
    rng, at, found = random.Random(seed), 0.0, list[PlannedRequest]()
    for phase in phases:
        for _ in range(phase.count):
            found.append(phase.lengths.draw(rng, number=len(found), at=at))
            at += rng.expovariate(1.0) * phase.gap
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSpec:
    """The router's `--auto-roles-*`. `switch_s`: time between the drain of a worker and its return."""

    flags: AutoRolesFlags
    switch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    to_role: Role
    began_s: float
    ended_s: float


@dataclass(slots=True)
class _Member:
    """A worker of the router's table and of the cluster. `state`: its last report."""

    worker: Worker
    planned: PlanWorker
    state: StateReply | None = None


@dataclass(slots=True, kw_only=True)
class RoleMoves:
    """Looks at the cluster at every interval. `done`: all moves so far, in order of their ends."""

    spec: AutoSpec
    cluster: PlannedCluster
    done: list[Moved] = field(default_factory=list)
    _table: WorkerTable = field(default_factory=WorkerTable)
    _members: dict[int, _Member] = field(default_factory=dict)
    _draining: dict[int, Callable[[], None]] = field(default_factory=dict)
    _num_joined: int = 0
    _controller: Controller = field(init=False)
    _gauge: Gauge = field(init=False)

    def __post_init__(self) -> None:
        self._controller = Controller(self.spec.flags)
        self._gauge = Gauge(self.spec.flags)
        self.cluster.on_end = self._check_drained
        for pool in self.cluster.pools.values():
            for planned in pool:
                self._add_worker(planned)
        self._look_later()

    def _look_later(self) -> None:
        self.cluster.timeline.at(self.cluster.timeline.now_s + self.spec.flags.auto_roles_interval_s, self._look)

    def _look(self) -> None:
        """Read the reports requested at the last look; a worker in the middle of a step reports after it."""
        for member in self._members.values():
            self._report(member)
        now_s = self.cluster.timeline.now_s
        for move in self._controller.tick(now_s, self._gauge.read(self._table.workers(), now_s)):
            self._begin(move)
        for member in self._members.values():
            member.planned.receive(GetState("planned"))  # the worker reports in its next turn
        self._look_later()

    def _report(self, member: _Member) -> None:
        state, spec = member.planned.state, member.planned.spec
        if state is not None and state is not member.state:
            member.state = state
            most = spec.engine.max_running_requests
            entry = v1_loads_entry(state, mode=spec.role, max_running_requests=most, num_live=0)
            self._table.loads.on_report(member.worker, parse_load(entry))

    def _begin(self, move: Move) -> None:
        member = self._members[move.worker_id]
        self._table.retire(member.worker.url)
        began_s = self.cluster.timeline.now_s
        self.cluster.pools[member.planned.spec.role].remove(member.planned)
        self._draining[id(member.planned)] = partial(self._drained, move, member, began_s)
        self._check_drained(member.planned)

    def _check_drained(self, planned: PlanWorker) -> None:
        is_idle = not any(planned in live.open_workers for live in self.cluster._live.values())
        if id(planned) in self._draining and is_idle:
            self._draining.pop(id(planned))()

    def _drained(self, move: Move, member: _Member, began_s: float) -> None:
        back_s = max(self.cluster.timeline.now_s, member.planned.clock.now_s) + self.spec.switch_s
        self.cluster.timeline.at(back_s, partial(self._back, move, member, began_s))

    def _back(self, move: Move, member: _Member, began_s: float) -> None:
        self._table.remove(member.worker.url)
        del self._members[member.worker.worker_id]
        self._add_worker(self.cluster.join(move.to_role.value))
        now_s = self.cluster.timeline.now_s
        self._controller.ended(move, ok=True, now_s=now_s)
        self.done.append(Moved(to_role=move.to_role, began_s=began_s, ended_s=now_s))

    def _add_worker(self, planned: PlanWorker) -> None:
        self._num_joined += 1
        role = Role(planned.spec.role)
        worker = self._table.add(f"http://planned-{self._num_joined}:1", role=role)
        self._table.on_models(worker, (MODEL,))
        self._table.on_check(worker, Check.OK, now_s=self.cluster.timeline.now_s)
        self._members[worker.worker_id] = _Member(worker, planned)
