"""Steps of a drafter in the executor: when they come, what stands in for them, and what is planned before they have ended."""

import pytest

from engine.speculative.drafts import number_of
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


# ---- At depth 2: what a step reads lies on the device.


def overlapped(drafts: str = "modeled right", **setup: object) -> EngineInATest:
    return one(drafts, depth=2, lag=True, **setup)


def tokens_of(engine: EngineInATest, kind: str) -> list[list[int]]:
    """Of the items of each step of a kind."""
    named = zip(kinds(engine), engine.plans, strict=True)
    return [[item.tokens[0] for item in plan.items] for of, plan in named if of == kind]


def test_each_step_is_planned_before_the_one_before_has_ended() -> None:
    engine = overlapped()
    engine.answer("r", [1, 2, 3], max_new_tokens=22)
    assert engine.tokens["r"] == expected_tokens([1, 2, 3], 22)
    assert kinds(engine) == ["prompt", *["draft", "verify"] * 5, "plain"]
    assert engine.overlapped == len(engine.plans) - 2, "all but the first, and the last behind drafts that are none"
    for first, *drafts in tokens_of(engine, "verify"):
        assert first >= 0 and [number_of(token) for token in drafts] == [1, 2, 3]
    (newest,), *later = tokens_of(engine, "draft")
    assert newest == -1, "the prompt's token, in the cell of its slot"
    assert [number_of(token) for (token,) in later] == [0] * 4
    assert [plan.items[0].unverified for plan in engine.plans if plan.skips_model] == [0, 3, 3, 3, 3]


@pytest.mark.parametrize("drafts", ["modeled wrong", "modeled mixed", "trees mixed"])
def test_wrong_drafts_change_nothing(drafts: str) -> None:
    engine = overlapped(drafts)
    for n in range(4):
        engine.add(f"r{n}", [n, 2, 3], max_new_tokens=20 + n)
    engine.run()
    assert all(engine.tokens[f"r{n}"] == expected_tokens([n, 2, 3], 20 + n) for n in range(4))
    assert any(item.unverified for plan in engine.plans for item in plan.items)
    assert any(min(of) < -1 for of in tokens_of(engine, "verify")) or drafts.startswith("trees")


def test_trees_wait_for_the_host_which_chooses_their_rows() -> None:
    engine = overlapped("trees right")
    engine.answer("r", [1, 2, 3], max_new_tokens=20)
    assert engine.tokens["r"] == expected_tokens([1, 2, 3], 20)
    assert min(min(of) for of in tokens_of(engine, "verify")) >= 0
    assert max(item.unverified for plan in engine.plans for item in plan.items) > 0


def test_penalties_make_the_batch_wait() -> None:
    engine = overlapped()
    engine.add("r", [1, 2, 3], max_new_tokens=12)
    engine.add("penalized", [4, 5], max_new_tokens=12, frequency_penalty=0.5)
    engine.run()
    waits = [plan for plan in engine.plans if {item.rid for item in plan.items} == {"r", "penalized"}]
    assert engine.tokens["r"] == expected_tokens([1, 2, 3], 12)
    assert len(waits) > 3 and not any(item.unverified or item.tokens[0] < 0 for plan in waits for item in plan.items)


def test_drafts_of_a_step_that_fails_are_none() -> None:
    """The step behind it was planned with them: each is wrong, here as on the device."""
    engine = overlapped()
    engine.model.fails = lambda plan: plan.skips_model and plan.seq % 4 == 0
    engine.answer("r", [1, 2, 3], max_new_tokens=22)
    assert engine.tokens["r"] == expected_tokens([1, 2, 3], 22)
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_drafts < counters.drafts and counters.failed_steps > 0


def test_a_verify_step_that_fails_ends_its_requests_alone() -> None:
    """A step of the drafter is in flight behind it, and reads what an earlier one left."""
    engine = overlapped()
    engine.model.fails = lambda plan: plan.seq == 5
    engine.add("lost", [1, 2, 3], max_new_tokens=22)
    engine.run()
    assert kinds(engine)[4] == "verify" and engine.finish["lost"].kind == "abort"
    assert engine.answer("next", [1, 2, 3], max_new_tokens=22) == expected_tokens([1, 2, 3], 22)


def test_no_draft_lies_behind_the_pages_of_a_request() -> None:
    """The passes behind unverified drafts have room as if all of these counted."""
    engine = overlapped("modeled mixed", num_pages=5, page_size=4)
    engine.answer("r", [1, 2, 3], max_new_tokens=16)
    assert engine.tokens["r"] == expected_tokens([1, 2, 3], 16)
    for plan in engine.plans:
        for item in plan.items:
            assert item.kv_len + item.unverified + max(0, item.to_draft - 1) <= 20
