"""Priorities by literals: which request is admitted, preempted and retracted first."""

import pytest

from engine.core.policy import NO_PRIORITIES, Priorities
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens

PRIORITIES = Priorities(preempt_threshold=10)


def engine_of(num_pages: int, **settings: object) -> EngineInATest:
    return EngineInATest(page_size=4, num_pages=num_pages, **{"priorities": PRIORITIES, **settings})  # type: ignore[arg-type]


def running(engine: EngineInATest) -> list[str]:
    return [r.rid for r in engine.scheduler.stages.running]


@pytest.mark.parametrize(
    ("priorities", "priority", "at_s", "first"),
    [
        (Priorities(aging_s=10.0), 4, 5.0, "newer"),
        (Priorities(aging_s=10.0), 4, 60.0, "older"),
        (Priorities(low_first=True), -1, 0.0, "newer"),
    ],
)
def test_the_more_urgent_request_goes_first(priorities: Priorities, priority: int, at_s: float, first: str) -> None:
    engine = EngineInATest(priorities=priorities, max_running=1)
    engine.add("older", [1], priority=0, max_new_tokens=1)
    engine.now_s = at_s
    engine.answer("newer", [2], priority=priority, max_new_tokens=1)
    assert engine.plans[0].items[0].rid == first


@pytest.mark.parametrize(("priority", "preempted"), [(11, 1), (10, 0)])
def test_a_much_higher_priority_takes_a_running_place(priority: int, preempted: int) -> None:
    engine = EngineInATest(priorities=PRIORITIES, max_running=1, depth=2)
    engine.add("low", [1, 2], max_new_tokens=20)
    engine.turns(5)
    engine.answer("high", [3], priority=priority, max_new_tokens=3)
    assert engine.scheduler.counters.preemptions == preempted
    assert engine.tokens == {"low": expected_tokens([1, 2], 20), "high": expected_tokens([3], 3)}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preemption_takes_as_many_victims_as_it_needs(depth: int) -> None:
    """Beside three that take 3 of 12 pages each there is no room for 7: the lowest goes, then the latest of its equals."""
    engine = engine_of(12, depth=depth, radix=False)
    for rid, priority in (("a", 5), ("b", 0), ("c", 5)):
        engine.add(rid, [ord(rid), 1, 2, 3], priority=priority, max_new_tokens=8)
    engine.turns(depth)
    assert running(engine) == ["a", "c", "b"]
    high = list(range(20))
    engine.add("high", high, priority=50, max_new_tokens=8)
    engine.turns(depth + 1)
    assert running(engine) == ["a", "high"] and engine.scheduler.counters.preemptions == 2
    engine.run()
    assert engine.scheduler.counters.preemptions == engine.scheduler.counters.retractions == 2
    assert engine.tokens["high"] == expected_tokens(high, 8)
    assert engine.tokens["b"] == expected_tokens([ord("b"), 1, 2, 3], 8)


def test_a_preemption_spares_a_victim_that_it_does_not_need() -> None:
    """ "large" alone makes room, although "small" has the lower priority."""
    engine = engine_of(12, radix=False)
    engine.add("large", list(range(24)), priority=1, max_new_tokens=8)
    engine.add("small", [30], priority=0, max_new_tokens=3)
    engine.turns(2)
    engine.add("high", list(range(10, 42)), priority=50, max_new_tokens=8)
    engine.turns(2)
    assert set(running(engine)) == {"high", "small"} or "small" in engine.finish
    engine.run()
    assert engine.scheduler.counters.preemptions == 1


def test_memory_that_comes_back_anyway_costs_no_request_its_place() -> None:
    """An ended request with a step in flight is about to leave: the newcomer waits for that."""
    engine = engine_of(8, depth=2, radix=False)
    ending = expected_tokens([1, 2, 3, 4], 3)[2]
    engine.add("ends", [1, 2, 3, 4], eos=ending, max_new_tokens=12)
    engine.add("low", [5, 6, 7, 8], max_new_tokens=12)
    while "ends" not in engine.finish:
        engine.turn()
    assert [r.rid for r in engine.scheduler.stages.draining] == ["ends"]
    engine.answer("high", [9, 10, 11, 12], priority=50, max_new_tokens=12)
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(("aging_s", "arrives_s", "preempted"), [(None, 500.0, 1), (10.0, 100.0, 1), (10.0, 200.0, 0)])
def test_a_request_that_waited_longer_than_the_difference_keeps_its_place(
    aging_s: float | None, arrives_s: float, preempted: int
) -> None:
    """Otherwise it would stand before the newcomer in line, and take the place back at once."""
    engine = EngineInATest(priorities=Priorities(aging_s=aging_s), max_running=1)
    engine.add("old", [1], priority=0, max_new_tokens=5)
    engine.now_s = arrives_s
    engine.turn()
    engine.answer("new", [2], priority=15, max_new_tokens=2)
    assert engine.scheduler.counters.preemptions == preempted
    assert engine.tokens == {"old": expected_tokens([1], 5), "new": expected_tokens([2], 2)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("priorities", "priority", "victim"),
    [
        (PRIORITIES, 100, "poor"),
        (Priorities(low_first=True), -100, "poor"),
        (NO_PRIORITIES, 100, "vip"),  # has the longer output
    ],
)
def test_out_of_memory_the_lowest_priority_goes_first(
    priorities: Priorities, priority: int, victim: str, depth: int
) -> None:
    engine = engine_of(8, depth=depth, conservativeness=0.0, priorities=priorities)
    engine.add("vip", [1, 2, 3, 4], priority=priority, max_new_tokens=24)
    engine.turn()
    engine.answer("poor", list(range(10, 18)), priority=0, max_new_tokens=12)
    assert engine.scheduler.counters.retractions > 0 and engine.scheduler.counters.preemptions == 0
    assert engine.outputs[victim][-1].retractions > 0
    assert victim == "vip" or engine.outputs["vip"][-1].retractions == 0
    assert engine.tokens["poor"] == expected_tokens(list(range(10, 18)), 12)
