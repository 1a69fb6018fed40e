"""Tokens in flight: what a plan may read of them, and what becomes of a sample after the end of its request."""

import pytest

from engine.core.request import Request
from engine.core.state import check_no_future, check_reads
from tests.core.engine_in_a_test import EngineInATest, request_of


def request_with(*, known: int, pending: int) -> Request:
    request = request_of([1] * known, max_new_tokens=9)
    request.pending = pending
    return request


@pytest.mark.parametrize(
    ("known", "pending", "start", "end"),
    [(6, 0, 0, 6), (6, 0, 0, 4), (6, 0, 5, 6), (6, 1, 6, 7), (6, 2, 7, 8), (6, 3, 8, 9)],
)
def test_what_may_be_read(known: int, pending: int, start: int, end: int) -> None:
    check_reads(request_with(known=known, pending=pending), start, end)


@pytest.mark.parametrize(
    ("known", "pending", "start", "end"),
    [
        (6, 0, 6, 7),  # no step samples it
        (6, 0, 4, 7),
        (6, 1, 5, 6),  # would overwrite a token that no step has read
        (6, 2, 6, 7),  # the cell holds the token after it
        (6, 1, 7, 8),  # not sampled yet
        (6, 1, 6, 8),
    ],
)
def test_what_may_not(known: int, pending: int, start: int, end: int) -> None:
    with pytest.raises(AssertionError, match=r"^r: position"):
        check_reads(request_with(known=known, pending=pending), start, end)


def test_a_slot_with_a_sample_in_flight_is_not_given_back() -> None:
    check_no_future(request_with(known=1, pending=0))
    with pytest.raises(AssertionError, match="1 samples in flight"):
        check_no_future(request_with(known=1, pending=1))


@pytest.mark.parametrize("skew", [-1, 1])
def test_a_planner_that_loses_count_is_stopped_before_the_launch(skew: int) -> None:
    """One token read twice, or one never read: nothing is launched."""
    engine = EngineInATest(depth=2)
    request = engine.add("r", [1, 2, 3], max_new_tokens=20)
    engine.turn()
    request.launched_len += skew
    with pytest.raises(AssertionError, match=r"^r: position"):
        engine.turn()
    assert len(engine.plans) == 1


def test_a_table_that_reuses_a_slot_too_early_is_stopped() -> None:
    engine = EngineInATest(depth=2)
    request = engine.add("r", [1, 2, 3], max_new_tokens=20)
    engine.turn()
    with pytest.raises(AssertionError, match="samples in flight"):
        engine.scheduler.table.close(request)
