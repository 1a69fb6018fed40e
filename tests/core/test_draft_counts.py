"""What is told of drafts adds up: the tokens that decode steps gave a request are those steps and its accepted drafts."""

import pytest
from msgspec.structs import replace

from engine.core.plan import PlanItem
from engine.messages import DraftCounts
from tests.core.engine_in_a_test import EngineInATest

DRAFTS = ["right", "mixed", "wrong", "modeled mixed"]


def counts_of(engine: EngineInATest, rid: str) -> DraftCounts:
    found = engine.outputs[rid][-1].drafts
    assert found is not None
    return found


def as_run(engine: EngineInATest) -> list[PlanItem]:
    """Items of the steps to come, with what the model fills in."""
    found, fill_in = list[PlanItem](), engine.model._filled_in

    def noted(item: PlanItem) -> PlanItem:
        found.append(fill_in(item))
        return found[-1]

    engine.model._filled_in = noted  # type: ignore[method-assign]
    return found


def verdicts(engine: EngineInATest, items: list[PlanItem], rid: str) -> list[str]:
    """Of each draft of a request: right, wrong behind right ones, or behind a wrong one or the end."""
    own = [item for item in items if item.rid == rid]
    known, found, still = [*own[0].tokens, *engine.tokens[rid]], list[str](), True
    for item in own:
        if not item.draft:
            still = True
            continue
        right = item.start < len(known) and known[item.start] == item.tokens[0]
        found.append("not judged" if not still or item.start >= len(known) else "right" if right else "wrong")
        still = still and right
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_each_token_is_a_steps_or_an_accepted_drafts(drafts: str, depth: int) -> None:
    """Also of requests that are retracted and computed again, where a prompt's step gives a token, and that sit a step out."""
    engine = EngineInATest(
        drafts=drafts, most_drafts=3, depth=depth, lag=depth == 2, num_pages=12, clip=0, conservativeness=0.0
    )
    items = as_run(engine)
    for n in range(4):
        engine.add(f"r{n}", [n, 2, 3], max_new_tokens=14 + n)
    engine.run()
    counters, drafted, accepted = engine.scheduler.counters, 0, 0
    assert counters.retractions > 0
    for rid, tokens in engine.tokens.items():
        of_prompts = sum(i.rid == rid and i.extend and i.sample for plan in engine.plans for i in plan.items)
        counts = counts_of(engine, rid)
        assert counts.steps + counts.accepted == len(tokens) - of_prompts
        drafted, accepted = drafted + counts.drafted, accepted + counts.accepted
    assert (counters.drafts, counters.accepted_drafts) == (drafted, accepted)
    assert (accepted > 0) == (drafts != "wrong") and (accepted < drafted) == (drafts != "right")
    judged = sum(verdicts(engine, items, rid).count(verdict) for rid in engine.tokens for verdict in ("right", "wrong"))
    assert counters.wrong_drafts == judged - accepted
    runs = [sum(i.draft for i in plan.items if i.rid == rid) for plan in engine.plans for rid in engine.tokens]
    assert counters.verified_runs == sum(map(bool, runs)) and sum(runs) == drafted


def test_drafts_behind_an_end_were_verified_and_not_accepted() -> None:
    engine = EngineInATest(drafts="right", most_drafts=8)
    engine.answer("r", [1, 2, 3], max_new_tokens=40)
    end = engine.tokens["r"][6]
    again = EngineInATest(drafts="right", most_drafts=8)
    again.answer("r", [1, 2, 3], max_new_tokens=40, eos=end)
    counts = counts_of(again, "r")
    assert counts.steps + counts.accepted == len(again.tokens["r"]) - 1 < 40
    assert counts.drafted == sum(item.draft for plan in again.plans for item in plan.items) > counts.accepted


def test_without_drafting_no_draft_is_reported() -> None:
    engine = EngineInATest()
    engine.answer("r", [1, 2, 3], max_new_tokens=9)
    assert engine.outputs["r"][-1].drafts is None


def test_a_retraction_behind_accepted_drafts_sends_no_hidden_state_twice() -> None:
    engine = EngineInATest(drafts="right", most_drafts=3)
    request = engine.add("r", [1, 2, 3], max_new_tokens=20)
    request.message = replace(request.message, return_hidden_states=True)
    while engine.scheduler.counters.accepted_drafts < 2:
        engine.turn()
    assert engine.scheduler.retract_all() == 1
    engine.run()
    rows = [row for output in engine.outputs["r"] for row in output.hidden]
    assert len(rows) == len(set(rows)) == len(engine.tokens["r"]) - 1, "of the last token there is none"
