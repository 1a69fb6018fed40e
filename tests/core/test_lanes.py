"""PD multiplexing in the core: prompts and decodes in two lanes, whose steps are planned, run and collected in any order."""

import pytest

from engine.core.lanes import Lane
from engine.core.plan import Plan, StepResult
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens


def plan_of(engine: EngineInATest, lane: Lane) -> Plan:
    engine.lane = lane
    plan = engine.next_plan()
    assert plan is not None
    engine.launch(plan)
    return plan


def test_a_decode_step_is_planned_and_collected_while_a_prompt_is_computed() -> None:
    engine = EngineInATest(multiplexed=True, lag=True)
    engine.add("a", [1, 2, 3])
    plan_of(engine, Lane.PREFILL)
    engine.collect(Lane.PREFILL)
    engine.add("b", list(range(30)))
    prompt = plan_of(engine, Lane.PREFILL)
    decode = plan_of(engine, Lane.DECODE)
    assert ([i.rid for i in prompt.items], [i.rid for i in decode.items]) == (["b"], ["a"])
    engine.collect(Lane.DECODE)
    assert engine.tokens == {"a": expected_tokens([1, 2, 3], 2)}
    assert prompt in [plan for plan, _ in engine.launched]
    engine.run()
    assert engine.tokens == {"a": expected_tokens([1, 2, 3], 8), "b": expected_tokens(list(range(30)), 8)}


def test_a_request_changes_lanes_when_its_prompt_is_collected_and_opens_its_row_there() -> None:
    engine = EngineInATest(multiplexed=True)
    engine.add("a", [1, 2, 3, 4, 5])
    prompt = plan_of(engine, Lane.PREFILL)
    engine.lane = Lane.DECODE
    assert engine.next_plan() is None
    engine.collect(Lane.PREFILL)
    decode = plan_of(engine, Lane.DECODE)
    (opened,), (item,) = decode.opens, decode.items
    assert opened.slot == prompt.opens[0].slot and opened.output_ids == expected_tokens([1, 2, 3, 4, 5], 1)
    assert item.page_start == 0 and len(item.new_pages) == 2 and item.tokens == opened.output_ids
    assert decode.closes == []
    engine.add("b", [7])
    assert plan_of(engine, Lane.PREFILL).closes == [opened.slot]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("num_pages", [20, 64])
def test_every_answer_is_right_in_any_order_of_the_lanes(depth: int, lag: bool, num_pages: int) -> None:
    """Few pages: requests are retracted, and their prompts computed again, in the other lane."""
    retractions = 0
    for seed in range(12):
        engine = EngineInATest(multiplexed=True, depth=depth, lag=lag, num_pages=num_pages, clip=0, max_running=5)
        engine.rng.seed(seed)
        prompts = {f"r{i}": [(i % 3) * 7 + k for k in range(engine.rng.randrange(1, 40))] for i in range(9)}
        for rid, prompt in prompts.items():
            engine.add(rid, prompt, max_new_tokens=12)
            engine.turns(engine.rng.randrange(6))
        engine.run()
        assert engine.tokens == {rid: expected_tokens(prompt, 12) for rid, prompt in prompts.items()}
        assert engine.scheduler.memory.allocator.counts()["held"] == 0
        both = {plan.lane for plan in engine.plans}
        assert both == set(Lane) and not any(p.extend for p in engine.plans if p.lane is Lane.DECODE)
        retractions += engine.scheduler.counters.retractions
    assert (retractions > 0) == (num_pages == 20)


def test_a_request_that_is_aborted_in_one_lane_keeps_its_memory_until_that_step_is_collected() -> None:
    engine = EngineInATest(multiplexed=True, lag=True)
    engine.add("a", list(range(10)))
    plan_of(engine, Lane.PREFILL)
    engine.abort("a")
    assert engine.scheduler.memory.allocator.counts()["held"] > 0
    engine.add("b", [1])
    plan_of(engine, Lane.PREFILL)
    engine.run()
    assert engine.scheduler.memory.allocator.counts()["held"] == 0


def test_a_failed_prompt_step_takes_no_decode_with_it() -> None:
    engine = EngineInATest(multiplexed=True)
    engine.add("a", [1, 2, 3])
    plan_of(engine, Lane.PREFILL)
    engine.collect(Lane.PREFILL)
    engine.model.fails = lambda plan: plan.lane is Lane.PREFILL
    engine.add("b", [4, 5, 6])
    engine.run()
    assert engine.tokens["a"] == expected_tokens([1, 2, 3], 8) and engine.finish["b"].status == 503


def test_a_row_whose_step_is_in_flight_does_not_change_lanes() -> None:
    engine = EngineInATest(multiplexed=True)
    request = engine.add("a", [1, 2, 3])
    plan_of(engine, Lane.PREFILL)
    with pytest.raises(AssertionError, match="changes lanes under a step in flight"):
        engine.scheduler.table.reopen(request)


def test_a_plan_without_a_lane_is_a_mistake_with_two_lanes_and_a_lane_without_them() -> None:
    for multiplexed, lane in ((True, None), (False, Lane.DECODE)):
        with pytest.raises(AssertionError, match="each plan has a lane"):
            EngineInATest(multiplexed=multiplexed).scheduler.schedule(lane=lane)


def test_results_of_the_lanes_are_taken_by_plan() -> None:
    engine = EngineInATest(multiplexed=True)
    engine.add("a", [1])
    plan = plan_of(engine, Lane.PREFILL)
    with pytest.raises(AssertionError):
        engine.scheduler.collect(plan, StepResult(plan.seq + 1, []))
