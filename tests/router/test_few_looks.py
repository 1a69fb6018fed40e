"""Retries, moves, and requests with objectives take the worker that a look at each would take, and look at few."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from router.admission import in_time
from router.admission.forecast import MIN_POINTS, STALE_S, Forecast
from router.admission.headroom import BLOCK
from router.admission.in_time import InTime, Objective, look_in_time, objectives_of
from router.admission.queue import RequestRefused
from router.attempts.failed_workers import MAX_JOINS, FailedWorkers
from router.attempts.request import Slo
from router.attempts.upstream_call import CallFailed
from router.choice.cache_aware import CacheAware
from router.choice.policies import (
    ConsistentHashing,
    LeastLoad,
    Placement,
    Policy,
    PowerOfTwo,
    Random,
    RoundRobin,
    RoutingHints,
)
from router.choice.prefix_index import PrefixIndex
from router.config import ChoiceFlags
from router.pool import workers as table_module
from router.pool.load_order import load_key
from router.pool.pool import MAX_GAPS, Pool, WorkerPool
from router.pool.servers import server_of
from router.pool.states import Check
from router.pool.worker import LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from service.prefix_chain import BLOCK_TOKENS
from tests.router.dummies import table_of
from tests.router.test_pools import ROLES, Story, plain_least, plain_soonest, queue_ends


def policies(rng: random.Random, index: PrefixIndex) -> list[tuple[Policy, Policy]]:
    """Each twice, with the same draws."""
    seed = rng.random()
    one, other = random.Random(seed), random.Random(seed)
    flags = ChoiceFlags(balance_abs_threshold=6, balance_rel_threshold=1.5)
    return [
        (LeastLoad(), LeastLoad()),
        (RoundRobin(), RoundRobin()),
        (Random(one.randrange), Random(other.randrange)),
        (PowerOfTwo(one.randrange), PowerOfTwo(other.randrange)),
        (ConsistentHashing(), ConsistentHashing()),
        (CacheAware(index, flags), CacheAware(index, flags)),
    ]


def ask_of(rng: random.Random) -> RoutingHints:
    keys = [b"system", b"tools", *(b"%d.%d" % (rng.randrange(9), i) for i in range(rng.randrange(1, 7)))]
    tokens = len(keys) * BLOCK_TOKENS + rng.randrange(4 * BLOCK_TOKENS)
    return RoutingHints(prompt_tokens=tokens, keys=keys, session=str(rng.randrange(50)))


# ---- without the workers that failed it


def plain_best(failed: FailedWorkers, alive: Sequence[Worker]) -> list[Worker]:
    """The rule of router/attempts/failed_workers.py, a worker at a time."""

    def unjoined(worker: Worker) -> int:
        server = server_of(worker)
        return 0 if server is None else failed._unjoined.get(server, 0)

    left = [w for w in alive if unjoined(w) < MAX_JOINS]
    fresh = [w for w in left if w.worker_id not in failed._failed]
    return [w for w in fresh if not unjoined(w)] or fresh or left


class Trouble(Story):
    """Bootstrap servers move, too, and workers report queues."""

    def step(self) -> None:
        super().step()
        worker = self.rng.choice(self.table.workers())
        self.table.on_bootstrap(worker, "b", self.rng.choice((1, 2, 2, 2, worker.worker_id)))
        worker = self.rng.choice(self.table.workers())
        report = LoadReport(waiting_reqs=self.rng.randrange(2), capacity_tokens=self.rng.choice((1000, 8000)))
        self.table.loads.on_report(worker, report if self.rng.random() < 0.7 else None)


def failures(story: Story) -> FailedWorkers:
    failed = None
    for _ in range(story.rng.randrange(1, 5)):
        pair = [story.rng.choice(pool) for role in ROLES if (pool := story.table.pool(role, ""))]
        if pair:
            failure = CallFailed(story.rng.choice(pair), reason=story.rng.choice(("lost", "status")), status=503)
            failed = failed or FailedWorkers(failure)
            failed.note(failure, pair)
            if story.rng.random() < 0.5:
                server = server_of(pair[0]) or ("b", 2)
                failed._unjoined[server] = failed._unjoined.get(server, 0) + 1
    return failed or FailedWorkers(CallFailed(story.table.workers()[0], reason="lost"))


def same_choice(pool: Pool, plain: Sequence[Worker], story: Story, index: PrefixIndex) -> None:
    """Every policy takes the same of both."""
    assert [*pool] == list(plain) and len(pool) == len(plain) and all(w in pool for w in plain)
    if not plain:
        return
    assert [pool[place] for place in range(len(pool))] == list(plain)
    made, ask = WorkerPool(plain), ask_of(story.rng)
    assert pool.queue_ends() == queue_ends(plain) and pool.least_loaded() is plain_least(plain)
    assert [*pool.in_order()] == sorted(plain, key=load_key)
    for one, other in policies(story.rng, index):
        for _ in range(2):
            choice = one.look(pool, ask)
            assert choice == other.look(made, ask)
            one.note(choice, ask)
            other.note(choice, ask)


@pytest.mark.parametrize(("seed", "workers"), [(0, 8), (1, 8), (2, 60), (3, 60)])
def test_a_retry_goes_where_a_look_at_each_would_send_it(seed: int, workers: int) -> None:
    story, index, sizes = Trouble(random.Random(seed), workers=workers), PrefixIndex(max_blocks=64), set()
    story.table.on_gone = lambda worker: index.forget(worker.worker_id)
    for _ in range(80):
        story.step()
        failed, pools = failures(story), [story.table.ready(role, "", now_s=story.now_s) for role in ROLES]
        for pool in pools:
            if pool:
                best = failed.best_of(pool)
                same_choice(best, plain_best(failed, [*pool]), story, index)
                sizes.add(len(pool) - len(best))
    assert len(sizes) > 2
    story.table.check()


def test_workers_of_one_bootstrap_server_are_left_out_together() -> None:
    table = table_of(4 * MAX_GAPS, role=Role.PREFILL)
    for worker in table.workers():
        table.on_bootstrap(worker, "b", worker.worker_id // (2 * MAX_GAPS))
    pool = table.pool(Role.PREFILL, "")
    beside = pool.beside([("b", 0)])
    assert [w.bootstrap_port for w in beside] == [1] * 2 * MAX_GAPS and pool.beside([("b", 0)]) is beside
    table.on_bootstrap(pool[0], "b", 1)
    assert pool[0] in pool.beside([("b", 0)]), "it has moved"
    assert not pool.beside([("b", 0), ("b", 1)])


# ---- objectives


class Timed:
    """Workers of which some are known, each with a line of its own."""

    def __init__(self, rng: random.Random, role: Role, *, workers: int, flat: float = 0.1) -> None:
        self.flat = flat  # share of the lines that do not rise
        self.rng, self.forecast, self.table = rng, Forecast(), table_of(workers, role=role)
        self.now_s = 0.0
        self.unknown: list[Worker] = []
        for worker in self.table.workers():
            self.learn(worker)

    def learn(self, worker: Worker) -> None:
        ttft, itl = self.forecast.fits(worker)
        slow = self.rng.choice((1.0, 1.0, 1.1, 20.0))
        flat = self.rng.random() < self.flat
        for i in range(MIN_POINTS):
            x = 7 if flat else i
            ttft.add(500.0 * x, slow * (0.05 + 0.05 * x), self.now_s)
            itl.add(2.0 * x, slow * (0.01 + 0.002 * x), self.now_s)
        self.forecast.note_line(worker)

    def step(self) -> None:
        self.now_s += self.rng.choice((0.02, 0.02, 0.02, 0.6))
        loads, worker = self.table.loads, self.rng.choice(self.table.workers())
        match self.rng.randrange(8):
            case 0:
                self.forecast.forget(worker)
                self.unknown.append(worker)
            case 1:
                while self.unknown:
                    self.learn(self.unknown.pop())
                self.learn(worker)
            case 2:
                self.table.on_silence(worker, self.rng.random() < 0.5)
            case 3:
                loads.on_report(worker, LoadReport(capacity_tokens=100_000, used_tokens=self.rng.randrange(9000)))
            case _:
                lease = loads.charge(worker, self.rng.randrange(20_000))
                prompt = self.forecast.expect(worker, lease.tokens, now_s=self.now_s)
                if self.rng.random() < 0.5:
                    self.forecast.computed(prompt)
                    loads.release(lease)

    def slo(self) -> Slo:
        wanted_s = self.rng.choice((0.02, 0.06, 0.2, 0.5, 3.0, self.rng.random()))
        return Slo(ttft_s=wanted_s, itl_s=self.rng.choice((math.inf, wanted_s / 5)))


def plain_kept(pool: Sequence[Worker], objectives: Sequence[Objective], cached: dict[Worker, int]) -> list[Worker]:
    return [w for w in pool if all(objective.keeps(w, cached.get(w, 0)) for objective in objectives)]


def plain_look(
    policy: Policy, pool: Sequence[Worker], hints: RoutingHints, objectives: Sequence[Objective], now_s: float
) -> Worker | None:
    """What router/admission/in_time.py promises, a worker at a time. None: the request is refused."""
    index = policy.index if isinstance(policy, CacheAware) else PrefixIndex(max_blocks=1)
    matched = index.match(hints.keys)
    cached = {w: max(0, min(matched.depth(w.worker_id) * BLOCK_TOKENS, hints.prompt_tokens - 1)) for w in pool}
    kept = plain_kept(pool, objectives, cached)
    if kept and isinstance(policy, CacheAware):
        return plain_soonest(kept, hints, index, policy.flags, queues_of=pool)
    if kept:
        return policy.look(WorkerPool(kept), hints).worker
    for objective in objectives:
        for worker in sorted(pool, key=lambda w: (objective.fit(w).news_s, w.worker_id)):
            missed = [one for one in objectives if not one.keeps(worker, cached[worker])]
            if objective.is_stale(worker, now_s) and all(one.is_stale(worker, now_s) for one in missed):
                return worker
    return None


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("seed", range(2))
def test_a_request_with_objectives_goes_where_a_look_at_each_would_send_it(role: Role, seed: int) -> None:
    rng = random.Random(seed)
    story, index = Timed(rng, role, workers=150), PrefixIndex(max_blocks=64)
    flags = ChoiceFlags(balance_abs_threshold=6, balance_rel_threshold=1.5)
    refused = tried = 0
    chosen: list[Policy] = [LeastLoad(), RoundRobin(), ConsistentHashing(), CacheAware(index, flags)]
    for number in range(200):
        story.step()
        policy, hints, pool = chosen[number % 4], ask_of(rng), story.table.pool(role, "")
        narrow = pool.without({rng.choice(pool).worker_id}) if number % 3 == 0 else pool
        objectives = objectives_of(story.slo(), role, hints, story.forecast)
        expected = plain_look(policy, [*narrow], hints, objectives, story.now_s)
        try:
            choice = look_in_time(policy, narrow, hints, objectives, now_s=story.now_s)
        except RequestRefused as error:
            assert expected is None and error.retry_after_s is not None and error.retry_after_s >= 1
            refused += 1
            continue
        assert choice.worker is expected
        tried += not all(one.keeps(choice.worker, choice.cached_tokens) for one in objectives)
        policy.note(choice, hints)
        for objective in objectives:
            objective.order(pool, load_key).check()
    assert refused + tried > 2, (refused, tried)


def test_the_order_by_headroom_holds_when_its_first_workers_lose_all_of_it() -> None:
    story = Timed(random.Random(1), Role.PREFILL, workers=200, flat=0.0)
    (objective,) = objectives_of(Slo(ttft_s=1.0), Role.PREFILL, RoutingHints(prompt_tokens=100), story.forecast)
    pool = story.table.pool(Role.PREFILL, "")
    leases = []
    for worker in sorted(pool, key=objective.headroom, reverse=True):
        leases.append(story.table.loads.charge(worker, 10**7))
        if len(leases) == 150:  # and one has it again
            story.table.loads.release(leases[0])
        order = objective.order(pool, load_key)
        order.check()
        found = [*order.walk(100)]
        kept = [w for w in found if objective.headroom(w) >= 100]
        assert kept == [w for w in sorted(pool, key=load_key) if objective.headroom(w) >= 100]
        assert len(found) - len(kept) <= 2 * BLOCK


def test_those_in_time_are_drawn_from_evenly() -> None:
    """A draw that is late is drawn again: that favours nobody."""
    rng = random.Random(5)
    story = Timed(rng, Role.PREFILL, workers=12)
    hints = RoutingHints(prompt_tokens=500)
    objectives = objectives_of(Slo(ttft_s=0.3), Role.PREFILL, hints, story.forecast)
    pool = story.table.pool(Role.PREFILL, "")
    kept = [*InTime(pool, objectives)]
    counts = dict.fromkeys(kept, 0)
    for _ in range(400 * len(kept)):
        counts[look_in_time(Random(rng.randrange), pool, hints, objectives, now_s=0.0).worker] += 1
    assert 2 <= len(kept) < 12 and all(300 < count < 500 for count in counts.values()), counts


# ---- how many are looked at


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The workers of which anything was read."""
    seen: set[int] = set()

    class Watched(Worker):
        def __getattribute__(self, name: str) -> Any:
            seen.add(id(self))
            return super().__getattribute__(name)

    monkeypatch.setattr(table_module, "Worker", Watched)
    return seen


MANY = 2000


def busy_table(role: Role) -> tuple[WorkerTable, Forecast]:
    """A half of the workers is slow, and so has the least load: none of them is ever in time."""
    rng, table, forecast = random.Random(3), WorkerTable(), Forecast()
    for number in range(MANY):
        worker = table.add(f"http://h{number}:1", role=role)
        table.on_check(worker, Check.OK, now_s=0.0)
        slow = 100.0 if number % 2 else 1.0
        for i in range(MIN_POINTS):
            forecast.fits(worker)[0].add(500.0 * i, slow * (0.05 + 0.05 * i * rng.uniform(0.8, 1.2)), 0.0)
            forecast.fits(worker)[1].add(2.0 * i, slow * (0.01 + 0.002 * i * rng.uniform(0.8, 1.2)), 0.0)
        forecast.note_line(worker)
        if not number % 2:
            table.loads.charge(worker, 100 + rng.randrange(4000))
        table.loads.on_report(worker, LoadReport(capacity_tokens=100_000))
    return table, forecast


def most_looks(seen: set[int], act: Callable[[], object], change: Callable[[], object]) -> int:
    """Of a hundred times, when the structures are there and something has changed meanwhile."""
    act()
    most = 0
    for _ in range(100):
        change()
        seen.clear()
        act()
        most = max(most, len(seen))
    return most


def test_a_retry_and_a_move_look_at_few_workers(looks: set[int]) -> None:
    table, _ = busy_table(Role.PREFILL)
    rng, workers = random.Random(4), table.workers()

    def retry() -> Placement:
        failed = FailedWorkers(CallFailed(workers[7], reason="lost"))
        failed.note(failed.last, workers[7:8])
        failed._unjoined[server_of(workers[9]) or ("", 0)] = 1
        return LeastLoad().look(failed.best_of(table.ready(Role.PREFILL, "", now_s=0.0)), RoutingHints())

    def change() -> None:
        worker = rng.choice(workers)
        table.loads.charge(worker, 10)
        table.loads.on_report(worker, LoadReport(waiting_reqs=rng.randrange(2), capacity_tokens=1000))
        table.on_bootstrap(worker, "b", rng.randrange(1, 10**6))
        table.on_silence(worker, True)
        table.on_silence(worker, False)

    for act in (retry, lambda: table.others(workers[5]).least_loaded()):
        assert most_looks(looks, act, change) < 100


@pytest.mark.parametrize("wanted_s", [0.5, 0.01])
def test_a_request_with_objectives_looks_at_few_workers_though_half_of_all_are_late(
    looks: set[int], wanted_s: float
) -> None:
    """Also if all are late, and it is refused."""
    table, forecast = busy_table(Role.PREFILL)
    rng, workers = random.Random(4), table.workers()
    hints = RoutingHints(prompt_tokens=300)
    objectives = objectives_of(Slo(ttft_s=wanted_s), Role.PREFILL, hints, forecast)
    pool = table.pool(Role.PREFILL, "")

    def ask() -> object:
        try:
            return look_in_time(LeastLoad(), pool, hints, objectives, now_s=STALE_S / 2)
        except RequestRefused as error:
            return error

    def change() -> None:
        worker = rng.choice(workers)
        forecast.computed(forecast.expect(worker, 10, now_s=1.0))
        table.loads.charge(worker, 10)

    assert isinstance(ask(), RequestRefused if wanted_s < 0.05 else Placement)
    assert most_looks(looks, ask, change) < 4 * in_time.TRIES + 3 * BLOCK


def test_a_prompt_that_busy_workers_know_is_not_sought_among_all_idle_ones(looks: set[int]) -> None:
    table, index = WorkerTable(), PrefixIndex(max_blocks=64)
    for number in range(MANY):
        table.on_check(table.add(f"http://h{number}:1", role=Role.PREFILL), Check.OK, now_s=0.0)
    hints, group = RoutingHints(prompt_tokens=4 * BLOCK_TOKENS, keys=[b"a", b"b"]), table.workers()[:40]
    for worker in group:
        index.touch(worker.worker_id, hints.keys)
        table.loads.charge(worker, 10)
    policy, pool = CacheAware(index, ChoiceFlags()), table.pool(Role.PREFILL, "")
    rng, idle = random.Random(1), table.workers()[40:]
    choice = policy.look(pool, hints)
    assert choice.worker is group[0] and choice.cached_tokens == 2 * BLOCK_TOKENS
    change = lambda: table.loads.release(table.loads.charge(rng.choice(idle), 10))  # noqa: E731
    assert most_looks(looks, lambda: policy.look(pool, hints), change) < 2 * len(group) + 20
