"""Predicted growth, and what decode leaves free before it takes one more request, by literals; page_size 4."""

import random
from collections.abc import Callable

import pytest

from engine.core.estimates import (
    FEWEST,
    WINDOW,
    DecodeReserve,
    NewTokenRatio,
    OutputLengthEstimator,
    RatioRule,
    StepBudget,
)
from engine.core.plan import Plan
from engine.core.request import Request
from tests.core.engine_in_a_test import EngineInATest, plan_item, request_of
from tests.core.hash_model import expected_tokens


def request(prompt: int, *, generated: int = 0, limit: int, rid: str = "r") -> Request:
    return request_of(list(range(prompt)), rid=rid, generated=generated, max_new_tokens=limit)


def learned(*lengths: int) -> OutputLengthEstimator:
    growth = OutputLengthEstimator()
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
    engine.answer("before", list(range(8)), max_new_tokens=1)
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
    engine.answer("before", list(range(8)), max_new_tokens=1)
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


# ---- Steps that end in time: the budget with literals, and the scheduler that cuts prompts by it.
# No clock: durations are given.

FOREVER = 1e15  # attention costs nothing: one token is one unit of work


def make(*, first_rate: float = 0.001, attention_tokens: float = FOREVER) -> StepBudget:
    return StepBudget(max_step_s=1.0, page_size=16, attention_tokens=attention_tokens, first_rate=first_rate)


def settle(budget: StepBudget, seconds: Callable[[int], float], *, most: int = 1024, steps: int = 40) -> int:
    """The tokens of a step after some steps that took `seconds` each, of `most` tokens at most."""
    for _ in range(steps):
        tokens = min(most, budget.tokens(budget.work, 0))
        budget.note(step(tokens), seconds(tokens))
    return min(most, budget.tokens(budget.work, 0))


def step(num_tokens: int, *, start: int = 0, extend: bool = True) -> Plan:
    return Plan(seq=1, extend=extend, items=[plan_item(num_tokens, start=start, extend=extend)])


@pytest.mark.parametrize("first_rate", [0.00001, 0.001, 0.1])
@pytest.mark.parametrize(
    ("fixed_s", "per_token_s", "tokens"),
    [
        (0.0, 0.004, 250),
        (0.6, 0.002, 200),  # the rest of the time
        (4.0, 0.02, 448),  # out of reach: three times as long as a page, since less would hardly end it sooner
        (4.0, 0.0, 1024),
        (0.0, 0.0001, 1024),
    ],
)
def test_a_step_holds_what_the_measured_speed_allows(
    first_rate: float, fixed_s: float, per_token_s: float, tokens: int
) -> None:
    found = settle(make(first_rate=first_rate), lambda n: fixed_s + per_token_s * n)
    assert found == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("slow_s", [2.0, 30.0, 3600.0])
def test_one_slow_step_changes_nothing_and_a_slow_time_passes(slow_s: float) -> None:
    budget = make()
    assert settle(budget, lambda n: n / 500) == 500
    budget.note(step(500), slow_s)
    assert budget.tokens(budget.work, 0) == pytest.approx(500, rel=0.01)
    assert settle(budget, lambda n: slow_s * n / 500) == pytest.approx(max(16, 500 / slow_s), abs=32)
    assert settle(budget, lambda n: n / 500) == pytest.approx(500, rel=0.02)


def test_noise_on_every_step_keeps_it_near_its_time() -> None:
    """Each step takes up to 1.6 times as long as it should, by chance."""
    draw = random.Random(3)
    found = [settle(make(), lambda n: (0.2 + 0.002 * n) * draw.uniform(1.0, 1.6), steps=10 + i) for i in range(40)]
    assert sum(found) / len(found) == pytest.approx(250, rel=0.3) and min(found) >= 80 and max(found) <= 640


def test_a_first_compilation_does_not_last() -> None:
    """The first step of all met a compiler: the next says more, and the way up is short."""
    budget = make()
    budget.note(step(256), 30.0)
    assert budget.work == 16  # a page at least
    sizes = []
    for _ in range(8):
        budget.note(step(int(budget.work)), 0.0005 * budget.work)
        sizes.append(int(budget.work))
    assert sizes[:4] == [48, 144, 432, 1296]


def test_short_prompts_and_decodes_do_not_shorten_long_steps() -> None:
    """A short prompt costs more for each token: that is the step's own cost, not the prompt's."""
    budget = make()
    settle(budget, lambda n: 0.2 + 0.001 * n)
    for n in range(40):
        tokens = 10 + n % 5
        budget.note(step(tokens), 0.2 + 0.001 * tokens)
        budget.note(step(1, extend=False), 9.0)
    assert budget.tokens(budget.work, 0) == pytest.approx(800, rel=0.02)


def test_where_reading_the_weights_takes_too_long_chunks_do_not_shrink_to_a_page() -> None:
    """As on a crowded CPU without bf16 arithmetic: 4 s a step and 20 ms a token, up to three and a half times that by chance."""
    for seed in range(8):
        draw, budget = random.Random(seed), make(first_rate=1 / 56, attention_tokens=3840.0)
        done = steps = 0
        while done < 12_000:
            tokens = max(16, min(1024, budget.tokens(budget.work, done % 4000)) // 16 * 16)
            budget.note(step(tokens, start=done % 4000), (4 + 0.02 * tokens) * draw.uniform(1.0, 3.5))
            done, steps = done + tokens, steps + 1
        assert steps < 250, seed  # 750 with pages


def test_attention_to_a_long_prefix_makes_chunks_shorter() -> None:
    budget = make(attention_tokens=4000.0)
    for start in (0, 4000, 40_000):
        tokens = budget.tokens(budget.work, start)
        assert budget.work_of(start, tokens) <= budget.work < budget.work_of(start, tokens + 1)
    assert budget.tokens(budget.work, 0) == 898 and budget.tokens(budget.work, 40_000) == 90


def run(engine: EngineInATest, seconds: Callable[[Plan], float]) -> list[int]:
    """Prompt tokens of each step; the budget is told of each how long it took."""
    told = 0
    while engine.scheduler.stages.live:
        engine.turn()
        for plan in engine.plans[told:]:
            assert engine.scheduler.step_budget is not None
            engine.scheduler.step_budget.note(plan, seconds(plan))
        told = len(engine.plans)
    return [sum(item.q_len for item in plan.items if item.extend) for plan in engine.plans if plan.extend]


def test_chunks_follow_the_speed_in_whole_pages_and_tokens_stay_the_same() -> None:
    prompt = list(range(3, 103))
    budget = StepBudget(max_step_s=1.0, page_size=4, attention_tokens=FOREVER, first_rate=0.001)
    engine = EngineInATest(chunk=32, step_budget=budget)
    engine.add("a", prompt, max_new_tokens=3)
    assert run(engine, lambda plan: 0.1 * sum(item.q_len for item in plan.items)) == [32, *[8] * 8, 4]
    assert engine.tokens["a"] == expected_tokens(prompt, 3)


def test_a_hopeless_machine_computes_few_pages_a_step_and_never_stands_still() -> None:
    budget = StepBudget(max_step_s=1.0, page_size=4, attention_tokens=50.0, first_rate=1000.0)
    engine = EngineInATest(chunk=32, step_budget=budget)
    for first in (3, 30):
        engine.add(str(first), list(range(first, first + 16)), max_new_tokens=2)
    seconds = lambda plan: 60.0 * sum(item.q_len for item in plan.items)  # noqa: E731
    assert set(run(engine, seconds)) <= {4, 8, 12}


def test_several_prompts_share_the_time_of_a_step() -> None:
    budget = StepBudget(max_step_s=1.0, page_size=4, attention_tokens=FOREVER, first_rate=1 / 16)
    engine = EngineInATest(chunk=64, radix=False, step_budget=budget)
    for rid in "abcd":
        engine.add(rid, [random.Random(rid).randrange(3, 90) for _ in range(8)], max_new_tokens=1)
    assert run(engine, lambda plan: sum(item.q_len for item in plan.items) / 16) == [16, 16]


def test_a_budget_that_is_never_short_changes_no_plan() -> None:
    def plans(budget: StepBudget | None) -> list[Plan]:
        engine = EngineInATest(chunk=16, mixed_chunk=True, step_budget=budget)
        draw = random.Random(4)
        for n in range(6):
            engine.add(str(n), [draw.randrange(3, 90) for _ in range(draw.randrange(2, 60))], max_new_tokens=5)
        engine.run()
        return engine.plans

    wide = StepBudget(max_step_s=1e6, page_size=4, attention_tokens=100.0, first_rate=0.001)
    assert plans(wide) == plans(None)
