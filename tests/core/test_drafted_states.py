"""Recurrent states that drafts move: what the next plan takes back, which slots it keeps until then, what is kept for the next turn."""

from typing import Any

import pytest

from engine.core.mem_cache.state_slots import StateSlots
from engine.core.plan import Plan
from tests.core.engine_in_a_test import EngineInATest
from tests.core.guesses import KINDS, Guesses, drafting_of
from tests.core.hash_model import expected_tokens

PROMPT = list(range(1, 22))


def engine_of(drafts: str, **setup: Any) -> EngineInATest:
    made = {"state_slots": 8, "grid": 8, "chunk": 32, "num_pages": 64, "most_drafts": 3, **setup}
    return EngineInATest(drafts=drafts, **made)


def with_all_drafts(engine: EngineInATest) -> EngineInATest:
    """Each draft is as long as it can be, however the ones before it fared."""
    drafting = drafting_of(engine.scheduler)
    assert isinstance(drafting.drafter, Guesses)
    drafting._chances.of_match = lambda drafts, match: 0.9  # type: ignore[method-assign]
    drafting.drafter._random.randint = lambda low, high: high  # type: ignore[method-assign]
    return engine


def drafted(plan: Plan) -> dict[str, int]:
    """The drafted rows of each request."""
    rids = [item.rid for item in plan.items if item.draft]
    return {rid: rids.count(rid) for rid in rids}


def turn_until_rejected(engine: EngineInATest) -> None:
    states = engine.scheduler.memory.part(StateSlots)
    assert states is not None
    for _ in range(20):
        engine.turn()
        if states._rewinds:
            return
    raise AssertionError("no draft was rejected")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_plan_takes_back_what_rejected_drafts_have_moved(depth: int) -> None:
    engine = with_all_drafts(engine_of("wrong", depth=depth))
    assert engine.answer("r", PROMPT, max_new_tokens=20) == expected_tokens(PROMPT, 20)
    rejected = [i for i, plan in enumerate(engine.plans) if drafted(plan)]
    back = [i for i, plan in enumerate(engine.plans) if plan.rewinds]
    assert back == [i + 1 for i in rejected] and len(back) > 10
    for i in rejected:
        first = engine.plans[i].items[0]
        assert [rewind.length for rewind in engine.plans[i + 1].rewinds] == [first.kv_len], "no draft was right"


def test_nothing_is_taken_back_where_all_drafts_are_right() -> None:
    engine = engine_of("right")
    assert engine.answer("r", PROMPT, max_new_tokens=20) == expected_tokens(PROMPT, 20)
    assert any(drafted(plan) for plan in engine.plans) and not any(plan.rewinds for plan in engine.plans)


def test_a_request_that_ends_first_is_not_taken_back() -> None:
    """Its slot may be another's by then, or one that a peer writes."""
    engine = engine_of("wrong", state_slots=1)
    engine.add("r", PROMPT, max_new_tokens=20)
    turn_until_rejected(engine)
    engine.abort("r")
    engine.add("next", PROMPT[::-1], max_new_tokens=12)
    before = len(engine.plans)
    engine.turn()
    assert engine.plans[before].states and not engine.plans[before].rewinds
    engine.run()
    assert engine.tokens["next"] == expected_tokens(PROMPT[::-1], 12)


def test_a_slot_stays_with_its_request_until_it_has_been_taken_back() -> None:
    """Also where the step that does it has nothing else of the request."""
    engine = engine_of("wrong", depth=2, lag=True)
    states = engine.scheduler.memory.part(StateSlots)
    assert states is not None
    request = engine.add("r", PROMPT, max_new_tokens=20)
    turn_until_rejected(engine)
    engine.add("prompt", PROMPT[::-1], max_new_tokens=2)
    plan, slot = engine.next_plan(), request.recurrent.slot
    assert plan is not None and plan.rewinds and {item.rid for item in plan.items} == {"prompt"}
    engine.launch(plan)
    engine.abort("r")
    assert states.allocator.state_of(slot) == "held"
    while engine.launched:
        engine.collect()
    assert states.allocator.state_of(slot) == "free"
    engine.run()
    assert engine.tokens["prompt"] == expected_tokens(PROMPT[::-1], 2)


@pytest.mark.parametrize("retracted", [False, True])
def test_one_step_with_drafts_is_in_flight_at_a_time(retracted: bool) -> None:
    """What takes states back knows the last one alone: a handed-over request drafts when rows of another are judged."""
    engine = with_all_drafts(engine_of("mixed", depth=3, lag=True, most_drafts=7))
    request = engine.add("first", PROMPT, max_new_tokens=4)
    while not engine.plans or not drafted(engine.plans[-1]):
        engine.turn()
    assert len(engine.launched) == 1 and (request.samples_left == 0 or retracted)
    if retracted:
        engine.scheduler._departures.retract(request)
    engine.land("second", PROMPT[::-1], max_new_tokens=9)
    assert engine.next_plan() is None
    engine.run()
    assert engine.tokens == {"first": expected_tokens(PROMPT, 4), "second": expected_tokens(PROMPT[::-1], 9)}
    assert engine.scheduler.counters.accepted_drafts > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_of_a_chat_begins_in_an_answer_that_was_drafted(kind: str) -> None:
    """Rows end at 24 and 32 tokens of 21 + 12, so that the states there can be kept."""
    engine = engine_of(kind, most_drafts=7)
    engine.answer("turn", PROMPT, max_new_tokens=12)
    chat = [*PROMPT, *engine.tokens["turn"], 50]
    request = engine.add("next", chat, max_new_tokens=3)
    engine.run()
    assert request.stats.cached_tokens == 32 and engine.tokens["next"] == expected_tokens(chat, 3)
    ends = [(item.start, item.kv_len) for plan in engine.plans for item in plan.items if item.draft]
    assert ends and any(kv_len == 24 for _, kv_len in ends)


def test_no_rows_are_cut_where_nothing_is_kept() -> None:
    engine = with_all_drafts(engine_of("right", most_drafts=7, radix=False))
    engine.answer("r", PROMPT, max_new_tokens=12)
    assert max(sum(drafted(plan).values()) for plan in engine.plans) == 7
    assert engine.tokens["r"] == expected_tokens(PROMPT, 12)


@pytest.mark.parametrize("drafts", ["mixed", "modeled mixed"])
def test_no_more_requests_are_drafted_than_there_are_shadows(drafts: str) -> None:
    engine = engine_of(drafts, shadows=2)
    for at in range(5):
        engine.add(str(at), [at + 30, *PROMPT], max_new_tokens=12)
    engine.run()
    assert max(len(drafted(plan)) for plan in engine.plans) == 2
    assert max(sum(item.to_draft > 0 for item in plan.items) for plan in engine.plans) == 2 * (drafts != "mixed")
    assert engine.tokens == {str(at): expected_tokens([at + 30, *PROMPT], 12) for at in range(5)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backup_pages", [0, 1000])
def test_any_step_may_fail_or_retract(depth: int, backup_pages: int) -> None:
    """No answer has a wrong token, whichever states were to be taken back."""
    prompts = {f"r{i}": [i, *range(9 + i)] for i in range(5)}
    for failing in range(1, 21):
        flags = {"num_pages": 22, "clip": 0, "backup_pages": backup_pages, "state_slots": 12, "max_running": 8}
        engine = engine_of("mixed", depth=depth, **flags)
        engine.model.fails = lambda plan, failing=failing: plan.seq == failing  # type: ignore[misc]
        for rid, prompt in prompts.items():
            engine.add(rid, prompt, max_new_tokens=20)
        engine.run()
        assert engine.scheduler.counters.failed_steps == 1 and engine.scheduler.idle
        for rid, prompt in prompts.items():
            tokens, right = engine.tokens[rid], expected_tokens(prompt, 20)
            assert tokens == right if engine.finish[rid].kind == "length" else tokens == right[: len(tokens)]
        states = engine.scheduler.memory.part(StateSlots)
        assert states is not None and states.allocator.counts()["held"] == 0
