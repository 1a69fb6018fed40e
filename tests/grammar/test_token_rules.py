"""Token rules against their words: what a mask allows, by every answer of a small vocabulary."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.request import Grammar
from engine.grammar.queue import GrammarQueue
from engine.grammar.token_rules import NO_TOKEN, TokenRules, rules_of
from engine.sampling_params import InvalidParam, ReasoningGate, SamplingParams, check_sampling_params
from tests.core.engine_in_a_test import request_of
from tests.e2e.cluster import wait_until
from tests.grammar.compilers import END, EOS, VOCAB_SIZE, compiler_of, gate, gates, ids_of, in_mask, next_of, say
from tests.grammar.fixed import cycle

VOCAB = 37  # not a multiple of a word


def rules(allowed: tuple[int, ...] = (), bad: tuple[tuple[int, ...], ...] = ()) -> TokenRules:
    return TokenRules(None, allowed=allowed, bad_words=bad, vocab_size=VOCAB)


def tokens_of(mask: bytes) -> set[int]:
    assert len(mask) == 8
    return set(in_mask(mask, 64))


@settings(max_examples=100)
@given(
    allowed=st.sets(st.integers(0, 3), max_size=3),
    bad=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4),
)
def test_an_answer_is_possible_where_no_word_of_it_is_bad(allowed: set[int], bad: list[tuple[int, ...]]) -> None:
    for answer in product(range(4), repeat=4):
        it = rules(tuple(sorted(allowed)), tuple(bad))
        for at, token in enumerate(answer):
            head = answer[: at + 1]
            fits = (not allowed or token in allowed) and not any(head[-len(word) :] == word for word in bad)
            possible = tokens_of(it.bitmask())
            assert (token in possible) == fits and max(possible, default=0) < VOCAB
            assert it.ended == (not possible)
            if not fits:
                break
            assert it.accept(token)


def test_rules_yield_to_the_forced_end_of_the_reasoning() -> None:
    inner = cycle(turn=0, length=2)
    both = TokenRules(inner, allowed=(0, 1), bad_words=(), vocab_size=VOCAB, yields=True)
    assert tokens_of(both.bitmask()) == {1}
    both = TokenRules(inner, allowed=(0, 3), bad_words=(), vocab_size=VOCAB, yields=True)
    assert tokens_of(both.bitmask()) == tokens_of(inner.bitmask()) and not both.ended and not both.problem
    assert not both.accept(0) and both.problem == inner.problem != ""


def ruled(
    regex: str, *, allowed: str = "", bad: tuple[str, ...] = (), reasoning: ReasoningGate | None = None
) -> tuple[Grammar | None, str]:
    """The state that a request gets, or the message of its refusal."""
    compiler = compiler_of("llguidance")
    queue = GrammarQueue(compiler, gates=gates(), vocab_size=VOCAB_SIZE, eos_ids=[EOS])
    rule: dict[str, Any] = {"allowed_token_ids": ids_of(allowed), "bad_token_ids": tuple(map(ids_of, bad))}
    request = request_of([1], regex=regex, reasoning=reasoning, **rule)
    assert queue.add(request, field="regex", now_s=0.0) == []

    def is_decided() -> bool:
        _, outputs = queue.poll(0.0)
        refusals.extend(output.finish.message for output in outputs if output.finish is not None)
        return not queue.rids()

    refusals: list[str] = []
    wait_until(is_decided, within_s=60, what="the grammar")
    queue.close()
    return request.grammar, "".join(refusals)


def state_of(regex: str, **rule: Any) -> Grammar:
    grammar, refusal = ruled(regex, **rule)
    assert grammar is not None and not refusal
    return grammar


def test_a_grammar_and_rules_leave_what_both_allow() -> None:
    grammar = state_of("[a-f]+;", allowed="abx;", bad=("ab",))
    assert next_of(grammar) == "ab" and say(grammar, "a")
    assert next_of(grammar) == ";a" and not grammar.ended and say(grammar, ";")
    assert grammar.ended and not grammar.problem


def test_an_answer_ends_where_the_grammar_may_end_and_the_rules_leave_nothing_else() -> None:
    grammar = state_of("ab*", allowed="a")
    assert not grammar.ended and say(grammar, "a")
    assert grammar.ended and not grammar.problem
    grammar = state_of("ab*", allowed="ab")
    assert say(grammar, "a") and next_of(grammar) == "b"


def test_an_answer_is_refused_where_grammar_and_rules_leave_nothing() -> None:
    grammar = state_of("abc", allowed="ac")
    assert say(grammar, "a") and not grammar.ended
    assert next_of(grammar) == "b"  # a token comes
    assert not say(grammar, "b") and "bad_words leave no token" in grammar.problem
    _, refusal = ruled("abc", bad=("a",))
    assert refusal == f"regex: {NO_TOKEN}"


def test_rules_hold_in_the_reasoning_and_in_the_constrained_answer_behind_it() -> None:
    grammar = state_of("[a-f]c", bad=("z", "<", "b", "bc"), reasoning=gate(budget=2))
    assert "z" not in next_of(grammar) and say(grammar, "x") and say(grammar, "y")
    for character in END:
        assert next_of(grammar) == character and say(grammar, character)
    assert next_of(grammar) == "acdef" and say(grammar, "a")
    assert next_of(grammar) == "c" and say(grammar, "c") and grammar.ended
    grammar = state_of("[a-f]z", bad=("z",), reasoning=gate(budget=2))
    assert say(grammar, "xy" + END + "a")
    assert not grammar.ended and not say(grammar, "z") and grammar.problem == NO_TOKEN


def test_a_request_without_rules_has_none() -> None:
    assert rules_of(SamplingParams(), None, vocab_size=VOCAB) is None
    assert rules_of(SamplingParams(bad_token_ids=((1,),)), None, vocab_size=VOCAB) is not None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(allowed_token_ids=(1, VOCAB)), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=((1,), (2,))), "bad_words"),
        (SamplingParams(bad_token_ids=((1,),) * 2049), "bad_words"),
    ],
)
def test_what_cannot_be_followed_is_named(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidParam) as refused:
        check_sampling_params(params, vocab_size=VOCAB)
    assert refused.value.field == field
