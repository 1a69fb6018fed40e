"""Of a large pool few workers are looked at; what a request with objectives is told if all are late."""

import random
from collections import Counter
from typing import Any

import pytest

from router.attempts.request import RequestRefused, Slo
from router.choice.policies import (
    DRAWN,
    SCANNED,
    CacheAware,
    ConsistentHashing,
    LeastLoad,
    Placement,
    RoutingHints,
)
from router.choice.prefix_index import PrefixIndex
from router.config import ChoiceFlags
from router.history.forecast import MIN_POINTS, STALE_S, Forecast
from router.parts.admission import look_in_time, objectives_of
from router.pool import workers as table_module
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from service.kv_events import BLOCK_TOKENS
from tests.router.dummies import no_draw, table_of


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
