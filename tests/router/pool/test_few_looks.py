"""Retries and requests with objectives take the worker that a look at each would take; of a large pool few are looked at."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from router.admission import Objective, look_in_time, objectives_of
from router.attempts.failures import MAX_JOINS, CallFailed, FailedWorkers, server_of
from router.attempts.request import RequestRefused, Slo
from router.choice.policies import (
    DRAWN,
    SCANNED,
    CacheAware,
    ConsistentHashing,
    LeastLoad,
    Placement,
    Policy,
    Random,
    RoundRobin,
    RoutingHints,
)
from router.choice.prefix_index import PrefixIndex
from router.config import ChoiceFlags
from router.history.forecast import MIN_POINTS, STALE_S, Forecast
from router.pool import workers as table_module
from router.pool.worker import LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from service.kv_events import BLOCK_TOKENS
from tests.router.dummies import no_draw, table_of
from tests.router.pool.test_pools import ROLES, Story


def ask_of(rng: random.Random) -> RoutingHints:
    keys = [b"system", b"tools", *(b"%d.%d" % (rng.randrange(9), i) for i in range(rng.randrange(1, 7)))]
    tokens = len(keys) * BLOCK_TOKENS + rng.randrange(4 * BLOCK_TOKENS)
    return RoutingHints(prompt_tokens=tokens, keys=keys, session=str(rng.randrange(50)))


def plain_best(failed: FailedWorkers, alive: Sequence[Worker]) -> list[Worker]:
    """The rule of router/attempts/request.py, a rank for each worker: lower is better, and of 3 none is tried."""

    def rank(worker: Worker) -> int:
        server = server_of(worker)
        unjoined = 0 if server is None else failed._unjoined.get(server, 0)
        if unjoined >= MAX_JOINS:
            return 3
        return 2 if worker.worker_id in failed._failed else 1 if unjoined else 0

    best = min(map(rank, alive))
    return [] if best == 3 else [w for w in alive if rank(w) <= (2 if best == 2 else best)]


class Trouble(Story):
    """Bootstrap servers move, too."""

    def step(self) -> None:
        super().step()
        worker = self.rng.choice(self.table.workers())
        self.table.on_bootstrap(worker, "b", self.rng.choice((1, 2, 2, 2, worker.worker_id)))


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


@pytest.mark.parametrize(("seed", "workers"), [(0, 8), (1, 8), (2, 60), (3, 60)])
def test_a_retry_goes_where_a_look_at_each_would_send_it(seed: int, workers: int) -> None:
    story, sizes = Trouble(random.Random(seed), workers=workers), set()
    for _ in range(80):
        story.step()
        failed = failures(story)
        for pool in [story.table.ready(role, "", now_s=story.now_s) for role in ROLES]:
            if pool:
                best = failed.best_of(pool)
                assert [*best] == plain_best(failed, pool)
                sizes.add(len(pool) - len(best))
    assert len(sizes) > 2
    story.table.check()


class Timed:
    """Workers of which some are known, each with a line of its own."""

    def __init__(self, rng: random.Random, role: Role, *, workers: int) -> None:
        self.rng, self.forecast, self.table = rng, Forecast(), table_of(workers, role=role)
        self.now_s = 0.0
        self.unknown: list[Worker] = []
        for worker in self.table.workers():
            self.learn(worker)

    def learn(self, worker: Worker) -> None:
        ttft, itl = self.forecast.fits(worker)
        slow = self.rng.choice((1.0, 1.0, 1.1, 20.0))
        flat = self.rng.random() < 0.1
        for i in range(MIN_POINTS):
            x = 7 if flat else i
            ttft.add(500.0 * x, slow * (0.05 + 0.05 * x), self.now_s)
            itl.add(2.0 * x, slow * (0.01 + 0.002 * x), self.now_s)

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


def plain_look(
    policy: Policy, pool: Sequence[Worker], hints: RoutingHints, objectives: Sequence[Objective], now_s: float
) -> Worker | None:
    """What router/history/forecast.py promises, a worker at a time. None: the request is refused."""
    index = policy.index if isinstance(policy, CacheAware) else PrefixIndex(max_blocks=1)
    matched = index.match(hints.keys)

    def missed(worker: Worker) -> list[Objective]:
        cached = max(0, min(matched.depth(worker.worker_id) * BLOCK_TOKENS, hints.prompt_tokens - 1))
        return [one for one in objectives if not one.keeps(Placement(worker, cached))]

    kept = [w for w in pool if not missed(w)]
    if kept:
        first = policy.look(pool, hints).worker
        return first if first in kept else policy.look(kept, hints).worker
    for objective in objectives:
        for worker in sorted(pool, key=lambda w: (objective.fit(w).news_s, w.worker_id)):
            stale = [one.is_stale(worker, now_s) for one in missed(worker)]
            if objective.is_stale(worker, now_s) and all(stale):
                return worker
    return None


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("seed", range(2))
def test_a_request_with_objectives_goes_where_a_look_at_each_would_send_it(role: Role, seed: int) -> None:
    rng = random.Random(seed)
    story, index = Timed(rng, role, workers=SCANNED), PrefixIndex(max_blocks=64)
    flags = ChoiceFlags(balance_abs_threshold=6, balance_rel_threshold=1.5)
    refused = tried = 0
    chosen: list[Policy] = [
        LeastLoad(no_draw),
        RoundRobin(no_draw),
        ConsistentHashing(no_draw),
        CacheAware(no_draw, index, flags),
    ]
    for number in range(200):
        story.step()
        policy, hints, pool = chosen[number % 4], ask_of(rng), story.table.pool(role, "")
        objectives = objectives_of(story.slo(), role, hints, story.forecast)
        expected = plain_look(policy, pool, hints, objectives, story.now_s)
        try:
            choice = look_in_time(policy, pool, hints, objectives, now_s=story.now_s)
        except RequestRefused as error:
            assert expected is None and error.retry_after_s is not None and error.retry_after_s >= 1
            refused += 1
            continue
        assert choice.worker is expected
        tried += not all(one.keeps(choice) for one in objectives)
        policy.note(choice, hints)
    assert refused + tried > 2, (refused, tried)


def test_those_in_time_are_drawn_from_evenly() -> None:
    """A draw that is late is drawn again: that favours nobody."""
    rng = random.Random(5)
    story = Timed(rng, Role.PREFILL, workers=12)
    hints = RoutingHints(prompt_tokens=500)
    objectives = objectives_of(Slo(ttft_s=0.3), Role.PREFILL, hints, story.forecast)
    pool = story.table.pool(Role.PREFILL, "")
    kept = [w for w in pool if all(one.keeps(Placement(w)) for one in objectives)]
    counts = dict.fromkeys(kept, 0)
    for _ in range(400 * len(kept)):
        counts[look_in_time(Random(rng.randrange), pool, hints, objectives, now_s=0.0).worker] += 1
    assert 2 <= len(kept) < 12 and all(300 < count < 500 for count in counts.values()), counts


def test_a_refusal_names_the_shortest_time_of_the_objective_that_all_miss() -> None:
    table, forecast = table_of(2, role=Role.UNIFIED), Forecast()
    for worker, slow in zip(table.workers(), (1.0, 2.0), strict=True):
        for line, second_s in zip(forecast.fits(worker), (0.4, 0.02), strict=True):
            for _ in range(MIN_POINTS):
                line.add(1.0, slow * second_s, 0.0)
    for slo, why, said in (
        (Slo(ttft_s=0.1, itl_s=1.0), "slo_ttft", "400 ms"),
        (Slo(ttft_s=1.0, itl_s=0.01), "slo_itl", "20 ms"),
    ):
        objectives = objectives_of(slo, Role.UNIFIED, RoutingHints(prompt_tokens=1), forecast)
        with pytest.raises(RequestRefused, match=f"about {said}") as caught:
            look_in_time(LeastLoad(no_draw), table.workers(), RoutingHints(), objectives, now_s=1.0)
        assert caught.value.why == why


MANY = 2000


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The workers of which more than the id was read."""
    seen: set[int] = set()

    class Watched(Worker):
        def __getattribute__(self, name: str) -> Any:
            if name != "worker_id":
                seen.add(id(self))
            return super().__getattribute__(name)

    monkeypatch.setattr(table_module, "Worker", Watched)
    return seen


def busy_table(role: Role) -> tuple[WorkerTable, Forecast]:
    """Half of the workers are slow, and have the least load: none of them is ever in time."""
    table, forecast = table_of(MANY, role=role), Forecast()
    for number, worker in enumerate(table.workers()):
        slow = 100.0 if number % 2 else 1.0
        for i in range(MIN_POINTS):
            forecast.fits(worker)[0].add(500.0 * i, slow * (0.05 + 0.05 * i), 0.0)
        if not number % 2:
            table.loads.charge(worker, 100)
    return table, forecast


@pytest.mark.parametrize("wanted_s", [0.5, 0.01])
def test_a_request_with_objectives_looks_at_few_workers_though_half_of_all_are_late(
    looks: set[int], wanted_s: float
) -> None:
    """Also if all are late, and it is refused."""
    table, forecast = busy_table(Role.PREFILL)
    policy, hints = LeastLoad(random.Random(4).randrange), RoutingHints(prompt_tokens=300)
    objectives = objectives_of(Slo(ttft_s=wanted_s), Role.PREFILL, hints, forecast)
    pool = table.pool(Role.PREFILL, "")
    most = 0
    for _ in range(50):
        looks.clear()
        try:
            choice = look_in_time(policy, pool, hints, objectives, now_s=STALE_S / 2)
            assert wanted_s == 0.5 and choice.worker.worker_id % 2 == 0
        except RequestRefused:
            assert wanted_s == 0.01
        most = max(most, len(looks))
    assert DRAWN < most <= DRAWN + SCANNED


def test_the_best_of_a_few_random_workers_is_chosen_from_a_large_pool(looks: set[int]) -> None:
    table, rng = table_of(MANY), random.Random(1)
    tokens = [rng.randrange(10**6) for _ in range(MANY)]
    for worker, count in zip(table.workers(), tokens, strict=True):
        table.loads.charge(worker, count)
    pool, places, chosen = table.pool(Role.DECODE, ""), [0] * MANY, set()
    for place, worker in enumerate(sorted(pool, key=lambda w: w.load_tokens)):
        places[worker.worker_id] = place
    policy = LeastLoad(random.Random(2).randrange)
    for _ in range(200):
        looks.clear()
        worker = policy.look(pool, RoutingHints()).worker
        assert DRAWN - 3 <= len(looks) <= DRAWN
        assert tokens[worker.worker_id] == min(w.load_tokens for w in pool if id(w) in looks)
        chosen.add(places[worker.worker_id] * 8 // MANY)
    assert chosen <= {0, 1, 2, 3} and {0, 1} <= chosen, "the best of 16: mostly of the lower eighth, now and then not"


def test_a_small_pool_is_compared_whole_and_a_larger_one_is_not() -> None:
    small, large = table_of(SCANNED).workers(), table_of(SCANNED + 1).workers()
    drawn: list[int] = []

    def draw(count: int) -> int:
        drawn.append(count)
        return 5

    assert LeastLoad(draw).look(small, RoutingHints()).worker is small[0] and not drawn
    assert LeastLoad(draw).look(large, RoutingHints()).worker is large[5] and drawn == [SCANNED + 1] * DRAWN


def test_in_a_large_pool_a_prompt_still_finds_the_workers_that_know_it(looks: set[int]) -> None:
    table, index, rng = table_of(MANY, role=Role.PREFILL), PrefixIndex(max_blocks=64), random.Random(1)
    workers, pool = table.workers(), table.pool(Role.PREFILL, "")
    hints = RoutingHints(prompt_tokens=4 * BLOCK_TOKENS, keys=[b"a", b"b", b"c"])
    for worker in workers[100:400]:
        index.touch(worker.worker_id, hints.keys[:1])
    policy = CacheAware(rng.randrange, index, ChoiceFlags())
    for worker in (workers[7], workers[1900]):
        index.touch(worker.worker_id, hints.keys)
    table.loads.charge(workers[7], 10)
    looks.clear()
    choice = policy.look(pool, hints)
    assert choice == Placement(workers[1900], 3 * BLOCK_TOKENS)
    assert len(looks) <= DRAWN + 2, "a match below the threshold is none"
    table.remove(workers[1900].url)
    assert policy.look(table.pool(Role.PREFILL, ""), hints) == Placement(workers[7], 3 * BLOCK_TOKENS)


def test_a_prompt_that_many_workers_know_spreads_over_them_all() -> None:
    table, index = table_of(MANY, role=Role.PREFILL), PrefixIndex(max_blocks=64)
    hints = RoutingHints(prompt_tokens=2 * BLOCK_TOKENS, keys=[b"a", b"b"])
    for worker in table.workers()[500:560]:
        index.touch(worker.worker_id, hints.keys)
    policy, counts = CacheAware(random.Random(3).randrange, index, ChoiceFlags()), Counter[int]()
    for _ in range(300):
        choice = policy.look(table.pool(Role.PREFILL, ""), hints)
        counts[choice.worker.worker_id] += 1
        table.loads.charge(choice.worker, hints.prompt_tokens - choice.cached_tokens)
    assert sorted(counts) == [*range(500, 560)] and max(counts.values()) <= 12


def test_sessions_of_a_large_pool_stay_where_they_are() -> None:
    table, policy = table_of(300), ConsistentHashing(no_draw)
    sessions = [RoutingHints(session=f"s{i}") for i in range(200)]
    before = [policy.look(table.pool(Role.DECODE, ""), ask).worker for ask in sessions]
    gone = before[0]
    table.remove(gone.url)
    after = [policy.look(table.pool(Role.DECODE, ""), ask).worker for ask in sessions]
    assert all(new is old for old, new in zip(before, after, strict=True) if old is not gone) and gone not in after
