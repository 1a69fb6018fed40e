"""Tokens in flight: what a plan may read of them, and what becomes of a sample after the end of its request."""

import pytest

from engine.core.futures import check_no_future, check_reads
from engine.core.request import Request
from engine.messages import TokenLogprob
from tests.core.engine_in_a_test import EngineInATest, request_of
from tests.core.hash_model import expected_tokens
from tests.grammar.fixed import Fixed


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


@pytest.mark.parametrize("depth", [2, 3])
def test_samples_after_the_end_change_nothing(depth: int) -> None:
    """No output, token, logprob, grammar step, page or cached prefix comes of them."""
    prompt = [1, 2, 3, 4, 5]
    eos = expected_tokens(prompt, 6)[5]
    engine = EngineInATest(depth=depth, page_size=4)
    grammar = Fixed(1000)
    constrained = engine.add("constrained", prompt, eos=eos, max_new_tokens=40)
    constrained.grammar = grammar
    run = engine.model.run

    def with_logprobs(plan):  # type: ignore[no-untyped-def]
        result = run(plan)
        for item in result.items:
            item.logprob = TokenLogprob(-1.0, item.token)
        return result

    engine.model.run = with_logprobs  # type: ignore[method-assign]
    plain = engine.add("plain", [7, *prompt], eos=expected_tokens([7, *prompt], 6)[5], max_new_tokens=40)
    engine.run()
    assert engine.scheduler.counters.wasted_samples >= 2
    full_pages = 0
    for request in (constrained, plain):
        answer = expected_tokens(request.input_ids, 40, min(request.eos_ids))
        outputs = engine.outputs[request.rid]
        assert engine.tokens[request.rid] == request.output_ids == answer
        assert [lp.token_id for o in outputs for lp in o.logprobs] == answer
        assert [o.finish is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
        tokens = request.input_ids + answer
        match = engine.scheduler.memory.cache.match(tokens)
        assert len(match.pages) == len(tokens) // 4
        full_pages += len(match.pages)
        engine.model.verify(match.pages, tokens[: 4 * len(match.pages)])
    assert grammar.seen == engine.tokens["constrained"] and grammar.masks == len(grammar.seen)
    counts = engine.scheduler.memory.allocator.counts()
    assert counts["held"] == 0 and counts["cached"] == full_pages and engine.scheduler.idle
