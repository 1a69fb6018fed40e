"""The share that decode steps have beside prompts follows from the objective and from what steps take."""

import pytest

from engine.core.lane_share import ENOUGH, LEAST_FOR_PROMPTS, PACE, LaneShare


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


@pytest.mark.parametrize(("itl_s", "left"), [(0.01, LEAST_FOR_PROMPTS), (None, 0.5)])
def test_steps_that_leave_prompts_no_part_leave_them_time(itl_s: float | None, left: float) -> None:
    found = share(parts=1, itl_s=itl_s, taken_s=0.3)
    assert 0.3 / found.due_s(0.0) == pytest.approx(1 - left)


def test_prompts_that_need_not_wait_get_no_time_beyond_the_objective_s() -> None:
    assert share(parts=1, itl_s=0.01, waits=False, taken_s=0.3).due_s(0.0) == PACE * 0.01


def test_the_share_is_a_gauge() -> None:
    assert share(parts=4).gauges() == {"decode_share": 0.5}
