"""Finish checks with literals: their order, and their typed reasons."""

from collections.abc import Sequence

import pytest

from engine.core.outputs import check_finish
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.messages import FinishReason
from tests.core.engine_in_a_test import EngineInATest, request_of
from tests.core.hash_model import expected_tokens
from tests.grammar.fixed import Fixed

VOCAB_SIZE = 1000
FINISHED = FinishReason(kind="stop", matched=1)
ABORTED = FinishReason(kind="abort", message="aborted by the client")
STOPPED = FinishReason(kind="stop", matched="b", trim=1)


class Stopped:
    def look(self, output_ids: Sequence[int]) -> FinishReason:
        return STOPPED


def request_with(output_ids: list[int], **sampling: object) -> Request:
    request = request_of([1], **{"max_new_tokens": 100, **sampling})
    request.output_ids, request.stops = output_ids, Stopped()
    return request


def check(request: Request, *, bad: bool = False) -> FinishReason | None:
    return check_finish(request, bad=bad, vocab_size=VOCAB_SIZE)


def test_the_checks_come_in_their_order() -> None:
    """Everything holds at once, and is taken away from the front."""
    request, grammar = request_with([5, 6], max_new_tokens=2, stop_token_ids=(6,)), Fixed(2)
    grammar.seen = [5, 6]
    request.finish, request.abort, request.grammar = FINISHED, ABORTED, grammar
    assert check(request, bad=True) == FINISHED
    request.finish = None
    assert check(request, bad=True) == ABORTED
    request.abort = None
    reason = check(request, bad=True)
    assert reason is not None and (reason.kind, reason.status, reason.own) == ("abort", 500, True)
    assert "NaN" in reason.message
    assert check(request) == STOPPED, "no client is to see a stop string"
    request.stops = None
    assert check(request) == FinishReason(kind="length")
    request = request_with([5, 6], stop_token_ids=(6,))
    request.grammar = grammar
    assert check(request) == FinishReason(kind="stop")
    request.grammar = None
    assert check(request) == FinishReason(kind="stop", matched=6)
    request = request_with([5, 6])
    assert check(request) == STOPPED
    request.stops = None
    assert check(request) is None


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, VOCAB_SIZE + 7])
def test_a_token_that_the_model_does_not_have_has_its_own_reason(token: int) -> None:
    reason = check(request_with([token]))
    assert reason is not None and (reason.kind, reason.status, reason.own) == ("abort", 500, True)
    assert f"token {token}" in reason.message and str(VOCAB_SIZE) in reason.message
    assert check(request_with([token, 5])) == STOPPED, "only the last one is looked at"


@pytest.mark.parametrize("bad", [False, True])
def test_a_prefill_worker_hands_its_token_on_unjudged(bad: bool) -> None:
    request = request_with([-1 if bad else 5])
    request.prefill_only = True
    assert check(request, bad=bad) == FinishReason(kind="length")


def test_before_min_new_tokens_no_stop_string_is_looked_for() -> None:
    assert check(request_with([5], min_new_tokens=2)) is None
    assert check(request_with([5, 5], min_new_tokens=2)) == STOPPED


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sample", [ItemResult(VOCAB_SIZE), ItemResult(None), ItemResult(0, bad=True)])
def test_a_sample_that_is_none_ends_its_request_alone(depth: int, sample: ItemResult) -> None:
    """Its tokens up to there have come, that one is not fed to its grammar, and all memory is back."""
    engine = EngineInATest(depth=depth, vocab_size=VOCAB_SIZE)
    grammar = Fixed(50)
    engine.add("hurt", [1, 2, 3], max_new_tokens=20).grammar = grammar
    engine.add("other", [4, 5], max_new_tokens=9)
    run, steps = engine.model.run, []

    def broken_once(plan):  # type: ignore[no-untyped-def]
        result = run(plan)
        for item, got in zip(plan.items, result.items, strict=True):
            steps.append(item.rid)
            if item.rid == "hurt" and steps.count("hurt") == 3:
                got.token, got.bad = sample.token, sample.bad
        return result

    engine.model.run = broken_once  # type: ignore[method-assign]
    engine.run()
    assert engine.finish["hurt"].kind == "abort" and engine.finish["hurt"].status == 500
    good = expected_tokens([1, 2, 3], 2)
    assert engine.tokens["hurt"][:2] == good == grammar.seen
    assert engine.tokens["other"] == expected_tokens([4, 5], 9) and engine.finish["other"].kind == "length"
    assert engine.scheduler.memory.allocator.counts()["held"] == 0 and engine.scheduler.idle
