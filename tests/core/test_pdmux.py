"""PD multiplexing in the core: prompts and decodes in two lanes, whose steps are planned, run and collected in any order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.plan import Phase, Plan, StepResult
from engine.pdmux.phases import ENOUGH, MIN_FOR_PROMPTS, PACE, ROOMY, LaneShare
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens


def plan_of(engine: EngineInATest, phase: Phase) -> Plan:
    engine.phase = phase
    plan = engine.next_plan()
    assert plan is not None
    engine.launch(plan)
    return plan


def test_a_decode_step_is_planned_and_collected_while_a_prompt_is_computed() -> None:
    engine = EngineInATest(multiplexed=True, lag=True)
    engine.add("a", [1, 2, 3])
    plan_of(engine, Phase.PREFILL)
    engine.collect(Phase.PREFILL)
    engine.add("b", list(range(30)))
    prompt = plan_of(engine, Phase.PREFILL)
    decode = plan_of(engine, Phase.DECODE)
    assert ([i.rid for i in prompt.items], [i.rid for i in decode.items]) == (["b"], ["a"])
    engine.collect(Phase.DECODE)
    assert engine.tokens == {"a": expected_tokens([1, 2, 3], 2)}
    assert prompt in [plan for plan, _ in engine.launched]
    engine.run()
    assert engine.tokens == {"a": expected_tokens([1, 2, 3], 8), "b": expected_tokens(list(range(30)), 8)}


def test_a_request_changes_lanes_when_its_prompt_is_collected_and_opens_its_row_there() -> None:
    engine = EngineInATest(multiplexed=True)
    engine.add("a", [1, 2, 3, 4, 5])
    prompt = plan_of(engine, Phase.PREFILL)
    engine.phase = Phase.DECODE
    assert engine.next_plan() is None
    engine.collect(Phase.PREFILL)
    decode = plan_of(engine, Phase.DECODE)
    (opened,), (item,) = decode.opens, decode.items
    assert opened.slot == prompt.opens[0].slot and opened.output_ids == expected_tokens([1, 2, 3, 4, 5], 1)
    assert item.page_start == 0 and len(item.new_pages) == 2 and item.tokens == opened.output_ids
    assert decode.closes == []
    engine.add("b", [7])
    assert plan_of(engine, Phase.PREFILL).closes == [opened.slot]


def test_a_failed_prompt_step_takes_no_decode_with_it() -> None:
    engine = EngineInATest(multiplexed=True)
    engine.add("a", [1, 2, 3])
    plan_of(engine, Phase.PREFILL)
    engine.collect(Phase.PREFILL)
    engine.model.fails = lambda plan: plan.phase is Phase.PREFILL
    engine.answer("b", [4, 5, 6])
    assert engine.tokens["a"] == expected_tokens([1, 2, 3], 8) and engine.finish["b"].status == 503


def test_a_row_whose_step_is_in_flight_does_not_change_lanes() -> None:
    engine = EngineInATest(multiplexed=True)
    request = engine.add("a", [1, 2, 3])
    plan_of(engine, Phase.PREFILL)
    with pytest.raises(AssertionError, match="changes streams under a step in flight"):
        engine.scheduler.table.reopen(request)


def test_a_plan_without_a_lane_is_a_mistake_with_two_lanes_and_a_lane_without_them() -> None:
    for multiplexed, phase in ((True, None), (False, Phase.DECODE)):
        with pytest.raises(AssertionError, match="each plan has a phase"):
            EngineInATest(multiplexed=multiplexed).scheduler.schedule(phase=phase)


def test_results_of_the_lanes_are_taken_by_plan() -> None:
    engine = EngineInATest(multiplexed=True)
    engine.add("a", [1])
    plan = plan_of(engine, Phase.PREFILL)
    with pytest.raises(AssertionError):
        engine.scheduler.collect(plan, StepResult(plan.seq + 1, []))


# ---- The share that decode steps have beside prompts follows from the objective and from what
# steps take.


def share(parts: int = 4, itl_s: float | None = 0.1, *, waits: bool = True, taken_s: float | None = None) -> LaneShare:
    found = LaneShare(parts=parts, itl_s=itl_s, waits=waits)
    if taken_s is not None:
        note(found, taken_s)
    return found


def note(found: LaneShare, taken_s: float) -> None:
    for _ in range(ENOUGH):
        found.note(taken_s)


def test_at_first_decodes_have_a_half_of_the_parts_and_one_at_least() -> None:
    assert [share(parts).decode_parts for parts in (1, 2, 3, 8)] == [1, 1, 1, 4]


def test_without_an_objective_a_half_stays_theirs_and_steps_follow_at_once() -> None:
    found = share(itl_s=None, taken_s=9.0)
    assert found.decode_parts == 2 and found.due_s(5.0) == 5.0


def test_steps_that_take_too_long_get_parts_one_by_one_until_all_are_theirs() -> None:
    found = share()
    for parts in (3, 4, 4):
        note(found, 0.1)
        assert found.decode_parts == parts


def test_steps_that_end_early_give_parts_back_but_for_one() -> None:
    found = share(parts=4)
    for parts in (1, 1):
        note(found, 0.01)
        assert found.decode_parts == parts


def test_a_part_is_not_given_back_that_would_be_missed_at_once() -> None:
    """A step of 0.04 on two parts would take 0.08 on one."""
    assert share(parts=4, taken_s=0.04).decode_parts == 2


def test_a_single_slow_step_changes_nothing() -> None:
    found = share()
    for taken_s in (0.03, 0.03, 5.0, 0.03, 0.03):
        found.note(taken_s)
    assert found.decode_parts == 2


def test_beside_prompts_a_step_is_due_when_the_objective_asks_for_it() -> None:
    assert share().due_s(5.0) == 5.0 + PACE * 0.1


def test_the_second_token_of_a_request_is_due_as_long_after_its_first() -> None:
    """A step of 0.02 that begins 0.055 after the first token ends 0.075 after it; the others' step would be due later."""
    found = share(taken_s=0.02)
    found.note(0.02)
    assert found.due_s(5.0, 5.01) == pytest.approx(5.01 + PACE * 0.1 - 0.02)
    assert found.due_s(5.0, 5.07) == 5.0 + PACE * 0.1, "never later than without it"


def test_requests_that_join_take_no_time_that_is_left_to_prompts() -> None:
    found = share(parts=1, itl_s=0.01, taken_s=0.3)
    assert found.due_s(0.0, 0.0) == found.due_s(0.0)


@pytest.mark.parametrize(("itl_s", "left"), [(0.01, MIN_FOR_PROMPTS), (None, 0.5)])
def test_steps_that_leave_prompts_no_part_leave_them_time(itl_s: float | None, left: float) -> None:
    found = share(parts=1, itl_s=itl_s, taken_s=0.3)
    assert 0.3 / found.due_s(0.0) == pytest.approx(1 - left)


def test_prompts_that_need_not_wait_get_no_time_beyond_the_objective_s() -> None:
    assert share(parts=1, itl_s=0.01, waits=False, taken_s=0.3).due_s(0.0) == PACE * 0.01


# ---- A GPU gives a step its share when it begins, so prompts always keep a part.


def test_prompts_keep_a_part_where_a_step_keeps_its_share() -> None:
    found = share(parts=4, waits=False)
    for parts in (3, 3):
        note(found, 0.1)
        assert found.decode_parts == parts


def test_decodes_with_parts_of_their_own_follow_at_once() -> None:
    assert share(parts=4, waits=False, taken_s=0.01).due_s(5.0) == 5.0


def test_a_phase_alone_is_given_the_whole_device_where_a_step_keeps_its_share() -> None:
    for waits, alone in ((False, 0), (True, 2)):
        found = share(waits=waits)
        assert [found.parts_of(concurrent=concurrent) for concurrent in (True, False)] == [2, alone]


@given(
    parts=st.integers(1, 8),
    waits=st.booleans(),
    itl_s=st.floats(0.005, 0.2),
    taken_s=st.lists(st.floats(0.0005, 1.0), max_size=60),
)
def test_the_share_stays_in_its_bounds_whatever_steps_take(
    parts: int, waits: bool, itl_s: float, taken_s: list[float]
) -> None:
    found = share(parts, itl_s, waits=waits)
    for one in taken_s:
        before = found.decode_parts
        found.note(one)
        assert abs(found.decode_parts - before) <= 1
        assert 1 <= found.decode_parts <= (parts if waits or parts == 1 else parts - 1)


@given(work_s=st.floats(0.0005, 0.2), itl_s=st.floats(0.005, 0.2))
def test_the_share_settles_on_the_first_that_keeps_the_objective_and_is_not_too_roomy(
    work_s: float, itl_s: float
) -> None:
    """Steps take `work_s` on all four parts, and as much longer as they have fewer."""
    found = share(4, itl_s, waits=False)
    for _ in range(20):
        note(found, 4 * work_s / found.decode_parts)
    settled = found.decode_parts
    note(found, 4 * work_s / settled)
    assert found.decode_parts == settled
    assert 4 * work_s / settled <= PACE * itl_s or settled == 3
    assert settled == 1 or 4 * work_s / (settled - 1) >= ROOMY * itl_s


def test_the_share_is_a_gauge() -> None:
    assert share(parts=4).gauges() == {"decode_share": 0.5}
