"""Finish checks with literals: their order, their typed reasons, and what a regex sees of the text."""

from collections.abc import Sequence

import pytest

from engine.core.finish import check_finish
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.messages import FinishReason
from engine.text.stop_regex import compile_all
from tests.core.engine_in_a_test import EngineInATest, request_of
from tests.core.hash_model import expected_tokens
from tests.grammar.fixed import Fixed

VOCAB_SIZE = 1000
FINISHED = FinishReason(kind="stop", matched=1)
ABORTED = FinishReason(kind="abort", message="aborted by the client")


def texts_of(ids: Sequence[int], skip: bool) -> tuple[str, ...]:
    return ("".join(chr(i) for i in ids),)


def request_with(output_ids: list[int], **sampling: object) -> Request:
    request = request_of([1], **{"max_new_tokens": 100, **sampling})
    request.output_ids = output_ids
    request.stop_patterns = compile_all(request.sampling.stop_regex)
    return request


def check(request: Request, *, bad: bool = False) -> FinishReason | None:
    return check_finish(request, bad=bad, tail_texts=texts_of, vocab_size=VOCAB_SIZE)


def test_the_checks_come_in_their_order() -> None:
    """Everything holds at once, and is taken away from the front."""
    letters = [ord("a"), ord("b")]
    grammar = Fixed(2)
    grammar.seen = list(letters)
    request = request_with(letters, max_new_tokens=2, stop=("b",), stop_regex=("a.",), stop_token_ids=(ord("b"),))
    request.finish, request.abort, request.grammar = FINISHED, ABORTED, grammar
    assert check(request, bad=True) == FINISHED
    request.finish = None
    assert check(request, bad=True) == ABORTED
    request.abort = None
    assert check(request, bad=True) == FinishReason(kind="length")
    request = request_with(letters, stop=("b",), stop_regex=("a.",), stop_token_ids=(ord("b"),))
    request.grammar = grammar
    assert check(request, bad=True) == FinishReason(kind="stop")
    request.grammar = None
    assert check(request, bad=True) == FinishReason(kind="stop", matched=ord("b"))
    request = request_with(letters, stop=("b",), stop_regex=("a.",))
    reason = check(request, bad=True)
    assert reason is not None and (reason.kind, reason.status) == ("abort", 500) and "NaN" in reason.message
    assert check(request) == FinishReason(kind="stop", matched="b")
    request = request_with(letters, stop_regex=("x", "a."))
    assert check(request) == FinishReason(kind="stop", matched="a.", regex=True)
    assert check(request_with(letters)) is None


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, VOCAB_SIZE + 7])
def test_a_token_outside_the_vocabulary_has_its_own_reason(token: int) -> None:
    reason = check(request_with([token], stop_regex=(".",)))
    assert reason is not None and (reason.kind, reason.status) == ("abort", 500)
    assert f"token {token}" in reason.message and str(VOCAB_SIZE) in reason.message
    assert check(request_with([token, ord("x")])) is None, "only the last one is looked at"


@pytest.mark.parametrize(
    ("text", "pattern", "ends"),
    [
        ("abc", "b.", True),
        ("abc", "^b", False),
        ("abc", "^a", True),
        ("x" * 3000 + "abc", "^a", False),  # the window does not begin where the answer does
        ("x" * 3000 + "abc", "x", True),
        ("x" * 3000 + "abc", r"\bx", False),
        ("abc", "b$", False),
        ("abc", "c$", True),
        ("a\nb", "a.b", False),
        ("a" + "-" * 200 + "b", "a-*b", True),
        ("a" + "-" * 2000 + "b", "a-*b", False),  # longer than a match may be
        ("STOP", "(?i)stop", True),
        ("ä1", r"ä\d", True),
    ],
)
def test_what_a_regex_sees(text: str, pattern: str, ends: bool) -> None:
    reason = check(request_with([ord(c) for c in text], max_new_tokens=10_000, stop_regex=(pattern,)))
    assert (reason is not None) == ends


def test_before_min_new_tokens_no_regex_is_looked_for() -> None:
    assert check(request_with([ord("a")], min_new_tokens=2, stop_regex=("a",))) is None
    assert check(request_with([ord("a")] * 2, min_new_tokens=2, stop_regex=("a",))) is not None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sample", [ItemResult(VOCAB_SIZE), ItemResult(None), ItemResult(0, bad=True)])
def test_a_sample_that_is_none_ends_its_request_alone(depth: int, sample: ItemResult) -> None:
    """Its tokens up to there were told, that one is not fed to its grammar, and all memory is back."""
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
