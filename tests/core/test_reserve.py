"""Predicted growth, and what decode leaves free before it takes one more request, by literals; page_size 4."""

import pytest

from engine.core.growth import FEWEST, WINDOW, MeasuredGrowth
from engine.core.new_token_ratio import NewTokenRatio, RatioRule
from engine.core.request import Request
from engine.core.reserve import DecodeReserve
from tests.core.engine_in_a_test import EngineInATest, request_of


def request(prompt: int, *, generated: int = 0, limit: int, rid: str = "r") -> Request:
    return request_of(list(range(prompt)), rid=rid, generated=generated, max_new_tokens=limit)


def learned(*lengths: int) -> MeasuredGrowth:
    growth = MeasuredGrowth()
    for length in lengths:
        growth.note_end(length)
    return growth


def reserve(*, floor: int = 0, conservativeness: float = 0.0, ended: list[int] | None = None) -> DecodeReserve:
    growth = learned(*(ended or []))
    ratio = NewTokenRatio(RatioRule(conservativeness=conservativeness))
    return DecodeReserve(floor=floor, ratio=ratio, growth=growth, pages_for=lambda tokens: -(-tokens // 4))


def test_the_largest_single_request_can_finish() -> None:
    """Nothing is expected to grow, yet whoever has most left finds its room: 40 tokens from a full page on."""
    assert reserve().pages([request(8, limit=3), request(8, generated=4, limit=44), request(8, limit=20)]) == 10


def test_reserved_tokens_are_for_each_that_can_use_them() -> None:
    """16 each for three of 40; the fourth has 3 left."""
    coming = [request(8, limit=40), request(8, limit=40), request(8, limit=40), request(8, generated=5, limit=8)]
    assert reserve(floor=16).pages(coming) == -(-(3 * 16 + 3) // 4) == 13
    assert reserve(floor=0).pages(coming) == 10  # the largest single one


def test_the_ratio_stands_in_until_answers_have_ended() -> None:
    """0.7 of what is left: 28 tokens each. Then measured: all ended at 8 tokens."""
    coming = [request(8, limit=40) for _ in range(4)]
    assert reserve(conservativeness=1.0).pages(coming) == 4 * 28 // 4
    assert reserve(conservativeness=1.0, ended=[8] * FEWEST).pages(coming) == 10
    assert reserve(conservativeness=1.0, ended=[30] * FEWEST).pages(coming) == 4 * 30 // 4 + 0
    assert reserve(floor=35, ended=[30] * FEWEST).pages(coming) == 4 * 35 // 4


def test_the_worst_case_bounds_it() -> None:
    """Two tokens left in a page that is there: a floor of 64 tokens asks for nothing."""
    assert reserve(floor=64).pages([request(6, limit=2)]) == 0
    assert reserve(floor=64).pages([request(6, limit=2)] * 9) == 0
    assert reserve(floor=64).pages([request(5, limit=11)]) == 2  # 16 tokens are 4 pages, 2 of them for what is known
    assert reserve(conservativeness=1.0).pages([request(1, limit=3), request(4, limit=4)]) == 1


@pytest.mark.parametrize("prompt", range(1, 17))
def test_a_request_as_large_as_the_pool_gets_its_pages(prompt: int) -> None:
    """16 tokens in all and 4 pages: wherever the prompt ends, rounding must not keep it waiting for ever."""
    engine = EngineInATest(num_pages=4, page_size=4, reserve_floor=64)
    whole = request(prompt, limit=16 - prompt)
    assert engine.scheduler.held.adopt(whole) is None and engine.scheduler.held.reserve(whole)


def test_running_transferring_and_coming_ones_count() -> None:
    """16 pages. Two of 2 pages each may grow by 4 pages each, a third would too: 6 + 12 do not fit."""
    engine = EngineInATest(num_pages=16, page_size=4, reserve_floor=16)
    first, second, third = (request(8, limit=16, rid=rid) for rid in "abc")
    for one in (first, second, third):
        assert engine.scheduler.held.adopt(one) is None
    assert engine.scheduler.held.reserve(first) and engine.scheduler.held.reserve(second)
    assert not engine.scheduler.held.reserve(third) and third.pages == []
    second.output_ids = [0] * 12  # of its 16: it may still grow by 1 page only, but has 5 in its tokens
    assert engine.scheduler.held.reserve(third)


def test_a_retracted_request_finds_its_prefix_and_locks_it() -> None:
    engine = EngineInATest(num_pages=16, page_size=4)
    engine.add("before", list(range(8)), max_new_tokens=1)
    engine.run()
    cached = engine.scheduler.memory.available
    again = request(8, generated=3, limit=8)
    assert engine.scheduler.held.adopt(again) is None and engine.scheduler.held.reserve(again)
    assert (again.shared_pages, again.computed_len, len(again.pages)) == (2, 8, 3)
    assert engine.scheduler.memory.available == cached - 3
    detached = engine.scheduler.held.quarantine(again)
    assert len(detached.pages) == 1 and engine.scheduler.memory.available == cached - 1
    engine.scheduler.held.end_quarantine(detached)
    engine.scheduler.held.resume_here(again)
    engine.run()
    assert engine.scheduler.memory.available == cached


def test_a_retracted_request_without_room_changes_nothing() -> None:
    engine = EngineInATest(num_pages=4, page_size=4)
    engine.add("before", list(range(8)), max_new_tokens=1)
    engine.run()
    other = request(9, limit=1, rid="other")
    assert engine.scheduler.held.adopt(other) is None and engine.scheduler.held.reserve(other)
    again = request(8, generated=3, limit=8)
    assert engine.scheduler.held.adopt(again) is None
    before = engine.scheduler.memory.available
    assert not engine.scheduler.held.reserve(again) and again.pages == [] and again.lock is None
    assert engine.scheduler.memory.available == before
    engine.scheduler.check()


def test_a_request_ends_where_a_third_of_the_longer_answers_ended() -> None:
    growth = learned(10, 20, 30, 40)
    assert growth.remaining(request(5, generated=0, limit=100)) == 20
    assert learned(10, 20, 30, 40, 50, 60).remaining(request(5, generated=0, limit=100)) == 30
    assert growth.remaining(request(5, generated=25, limit=100)) == 5
    assert growth.remaining(request(5, generated=0, limit=12)) == 12  # not past its own limit
    assert growth.remaining(request(5, generated=40, limit=100)) == 60  # longer than all that was seen


def test_the_peak_counts_what_those_that_end_give_back() -> None:
    """Ten tokens each: one grows by 30; the other has ended by then and gave its 20 + 2 back."""
    growth = learned(*[30] * FEWEST)
    long, short = request(10, generated=0, limit=30), request(20, generated=0, limit=2)
    assert growth.peak_tokens([long], floor=0) == 30
    assert growth.peak_tokens([long, short], floor=0) == 10  # 40 held at the end, 30 now; 34 when the short one ends
    assert growth.peak_tokens([long, long], floor=0) == 60
    assert growth.peak_tokens([request(1, generated=29, limit=99)], floor=50) == 50


def test_old_answers_are_forgotten() -> None:
    growth = learned(*[1000] * WINDOW, *[5] * WINDOW)
    assert growth.remaining(request(1, generated=0, limit=2000)) == 5
    assert not learned(*[5] * (FEWEST - 1)).known and learned(*[5] * FEWEST).known
