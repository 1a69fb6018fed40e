"""Steps that end in time: the budget with literals, and the scheduler that cuts prompts by it. No clock: durations are given."""

import random
from collections.abc import Callable

import pytest

from engine.core.plan import Plan
from engine.core.step_budget import StepBudget
from tests.core.engine_in_a_test import EngineInATest, plan_item
from tests.core.hash_model import expected_tokens

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
