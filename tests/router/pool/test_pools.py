"""Who may be chosen after any events, also those that peers report."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from router.choice.policies import LeastLoad, RoutingHints
from router.config import BreakerFlags
from router.pool.breaker import Check, Event, Health
from router.pool.pairs import Group, fits
from router.pool.shared_load import SharedLoad
from router.pool.worker import PAIR, Lease, LoadReport, Role, Worker
from router.pool.workers import WorkerTable, missing_roles, serves
from service.kv_layout import Layout
from tests.router.dummies import no_draw

ROLES = (Role.PREFILL, Role.DECODE)
MODELS = ("m", "n", "")
MANY = 48
LAYOUT, OTHER_LAYOUT = Layout(14, "nixl", "m", 16, "bfloat16"), Layout(14, "nixl", "m", 32, "bfloat16")


class Story:
    """A table to which anything may happen, by `rng`."""

    def __init__(self, rng: random.Random, *, workers: int = MANY) -> None:
        self.rng = rng
        self.now_s = 0.0
        breaker = BreakerFlags(cb_failure_threshold=1, cb_success_threshold=2, cb_timeout_duration_s=5.0)
        self.table = WorkerTable(breaker=breaker)
        self.leases: list[Lease] = []
        for _ in range(workers):
            self.add()

    def add(self) -> None:
        number = self.rng.randrange(10**9)
        worker = self.table.add(f"http://h{number}:1", role=self.rng.choice(ROLES), now_s=self.now_s)
        self.table.on_check(worker, Check.OK, now_s=self.now_s)

    def step(self) -> None:
        """Loads change often, workers seldom."""
        self.now_s += self.rng.random()
        acts: list[Callable[[Worker], object]] = [self._charge, self._release, self._report, self._charge, self._report]
        rare: list[Callable[[Worker], object]] = [self._check, self._silence, self._fault, self._models, self._leave]
        self.rng.choice(rare if self.rng.random() < 0.2 else acts)(self.rng.choice(self.table.workers()))

    def _charge(self, worker: Worker) -> None:
        self.leases.append(self.table.loads.charge(worker, self.rng.choice((0, 10, 10, 500, self.rng.randrange(3000)))))

    def _release(self, worker: Worker) -> None:
        if self.leases:
            self.table.loads.release(self.leases.pop(self.rng.randrange(len(self.leases))))

    def _report(self, worker: Worker) -> None:
        said = {"waiting_tokens": self.rng.randrange(2000), "capacity_tokens": self.rng.choice((1000, 8000))}
        self.table.loads.on_report(worker, LoadReport(**said) if self.rng.random() < 0.9 else None)

    def _check(self, worker: Worker) -> None:
        result = self.rng.choice((Check.OK, Check.OK, Check.REFUSED, Check.DRAINING))
        self.table.on_check(worker, result, now_s=self.now_s)

    def _silence(self, worker: Worker) -> None:
        self.table.on_silence(worker, self.rng.random() < 0.5)

    def _fault(self, worker: Worker) -> None:
        worker.circuit.record(self.rng.choice((Event.FAULT, Event.BEGUN)), self.now_s)

    def _models(self, worker: Worker) -> None:
        self.table.on_models(worker, self.rng.choice(((), ("m",), ("n",), ("m", "n"))))

    def _leave(self, worker: Worker) -> None:
        match self.rng.randrange(6):
            case 5:
                self.table.on_layout(worker, self.rng.choice((None, LAYOUT, OTHER_LAYOUT)))
            case 0:
                self.table.remove(worker.url)
                self.add()
            case 1:
                self.table.retire(worker.url, last_resort=self.rng.random() < 0.5)
            case 2:
                self.table.on_role(worker, self.rng.choice(ROLES))
            case 3 if worker.switching_to is None:
                self.table.set_switching(worker, next(role for role in ROLES if role is not worker.role))
            case _:
                self.table.set_switching(worker, None)


def who_may(story: Story, role: Role, model: str) -> list[Worker]:
    """As `WorkerTable.ready` says, by looking at each worker."""
    up = [w for w in story.table.workers() if w.role is role and w.health is Health.UP and w.switching_to is None]
    alive = [w for w in up if not w.leaving] or [w for w in up if w.last_resort]
    serving = [w for w in alive if not model or serves(w.models, model)]
    heard = [w for w in serving if not w.silent] or serving
    return [w for w in heard if w.circuit.takes(story.now_s)] or heard


def who_may_meet(story: Story, model: str) -> set[tuple[int, int]]:
    """Ids of the workers of each pair whose layouts fit and that serve a model; of silent ones if a layout has no others."""
    alive = [story.table.alive(role) for role in PAIR]
    names = ("m", "n") if not model and story.table.models.several else (model,)
    found = set()
    for name in names:
        pools = [[w for w in pool if not name or serves(w.models, name)] for pool in alive]
        known = {w.process.layout for pool in pools for w in pool if w.process.layout is not None}
        for layout in known or {None}:
            fit = [[w for w in pool if not known or w.process.layout in (None, layout)] for pool in pools]
            heard = [[w for w in pool if not w.silent] or pool for pool in fit]
            found |= {(p.worker_id, d.worker_id) for p in heard[0] for d in heard[1]}
    return found


def pairs_of(groups: Sequence[Group]) -> set[tuple[int, int]]:
    for prefills, decodes in groups:
        assert all(fits(one, other) for one in prefills for other in decodes)
    return {(p.worker_id, d.worker_id) for prefills, decodes in groups for p in prefills for d in decodes}


@pytest.mark.parametrize("seed", range(6))
def test_pools_hold_the_eligible_workers_after_any_events(seed: int) -> None:
    story = Story(random.Random(seed), workers=8)
    seen = set()
    for _ in range(600):
        story.step()
        for role in ROLES:
            for model in MODELS:
                ready = story.table.ready(story.table.pool(role, model), now_s=story.now_s)
                assert [*ready] == who_may(story, role, model)
                seen.add(len(ready))
        for model in MODELS:
            assert pairs_of(story.table.routes(PAIR, model)) == who_may_meet(story, model)
            assert not (missing_roles(story.table, [PAIR], model) and story.table.routes(PAIR, model))
    assert len(seen) > 3
    story.table.check()


def peers(tmp_path: Path, count: int) -> list[WorkerTable]:
    tables = [WorkerTable(peers=SharedLoad(tmp_path / "load", row=row, num_rows=2)) for row in range(2)]
    for table in tables:
        for i in range(count):
            table.on_check(table.add(f"http://d{i}:1", role=Role.DECODE), Check.OK, now_s=0.0)
    return tables


def test_what_a_peer_sends_to_the_least_loaded_is_seen_at_once(tmp_path: Path) -> None:
    mine, other = peers(tmp_path, 64)
    pool, seen = mine.pool(Role.DECODE, ""), []
    for _ in range(len(pool)):
        worker = LeastLoad(no_draw).look(pool, RoutingHints()).worker
        seen.append(worker.worker_id)
        other.loads.charge(other.workers()[worker.worker_id], 100)
    assert sorted(seen) == list(range(len(pool)))


def test_what_a_peer_has_ended_is_seen_at_once(tmp_path: Path) -> None:
    mine, other = peers(tmp_path, 64)
    leases = [other.loads.charge(worker, 100) for worker in other.workers()]
    other.loads.release(leases[-1])
    found = LeastLoad(no_draw).look(mine.pool(Role.DECODE, ""), RoutingHints()).worker
    assert found.worker_id == leases[-1].worker.worker_id


def test_a_circuit_that_a_peer_holds_open_narrows_the_pool(tmp_path: Path) -> None:
    mine, other = peers(tmp_path, 3)
    assert ids_ready(mine, now_s=0.5) == [0, 1, 2]
    for _ in range(BreakerFlags().cb_failure_threshold):
        other.workers()[1].circuit.record(Event.FAULT, 1.0)
    assert ids_ready(mine, now_s=1.1) == ids_ready(other, now_s=1.1) == [0, 2]
    assert ids_ready(mine, now_s=62.0) == [0, 1, 2]


def ids_ready(table: WorkerTable, *, now_s: float) -> list[int]:
    return [w.worker_id for w in table.ready(table.pool(Role.DECODE, ""), now_s=now_s)]
