"""Steps of a drafter in the executor: when they come, and what stands in for them."""

from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens


def kinds(engine: EngineInATest) -> list[str]:
    """Of its plans."""
    of = [
        "draft" if plan.skips_model else "prompt" if plan.extend else "verify" if len(plan.items) > 1 else "plain"
        for plan in engine.plans
    ]
    return of


def one(drafts: str = "modeled right", **setup: object) -> EngineInATest:
    return EngineInATest(drafts=drafts, most_drafts=3, **setup)  # type: ignore[arg-type]


def test_drafts_come_before_each_decode_step() -> None:
    engine = one()
    engine.answer("r", [1, 2, 3], max_new_tokens=10)
    assert kinds(engine) == ["prompt", "draft", "verify", "draft", "verify", "plain"]
    assert engine.tokens["r"] == expected_tokens([1, 2, 3], 10)


def test_a_landed_prompt_is_drafted_for_at_once() -> None:
    engine = one()
    engine.land("r", [1, 2, 3], max_new_tokens=9)
    engine.run()
    assert kinds(engine) == ["draft", "verify", "draft", "verify"]


def test_without_free_pages_there_are_fewer_drafts_and_nothing_is_evicted() -> None:
    """Two tokens are left in the second page behind the next one; the third page holds a cached prefix."""
    engine = one(num_pages=3, page_size=4)
    engine.answer("first", [9, 9, 9, 9], max_new_tokens=1)
    engine.add("r", [1, 2, 3, 4, 5], max_new_tokens=7)
    engine.turns(2)
    assert engine.plans[-1].items[0].to_draft == 2
    assert engine.scheduler.memory.cache.num_evictable == 1
    engine.run()
    assert engine.tokens["r"] == expected_tokens([1, 2, 3, 4, 5], 7) and engine.scheduler.counters.retractions == 0


def test_a_step_of_a_drafter_that_fails_costs_drafts_alone() -> None:
    engine = one()
    engine.model.fails = lambda plan: plan.skips_model
    engine.answer("r", [1, 2, 3], max_new_tokens=6)
    assert set(kinds(engine)) == {"prompt", "draft", "plain"}
    assert engine.tokens["r"] == expected_tokens([1, 2, 3], 6)
