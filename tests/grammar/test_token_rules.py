"""Token rules against their words: what a mask allows, by every answer of a small vocabulary."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.token_rules import TokenRules, rules_of
from engine.sampling_params import InvalidParam, SamplingParams, check_sampling_params
from tests.core.proof.cycle_grammar import CycleGrammar

VOCAB = 37  # not a multiple of a word


def rules(allowed: tuple[int, ...] = (), bad: tuple[tuple[int, ...], ...] = ()) -> TokenRules:
    return TokenRules(None, allowed=allowed, bad_words=bad, vocab_size=VOCAB)


def tokens_of(mask: bytes) -> set[int]:
    assert len(mask) == 8
    return {t for t in range(64) if mask[t // 8] >> t % 8 & 1}


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


def test_rules_leave_a_grammar_its_last_word() -> None:
    """`inner` may be the forced end of the reasoning: it comes, whatever the rules say."""
    inner = CycleGrammar(turn=0, length=2)
    both = TokenRules(inner, allowed=(0, 1), bad_words=(), vocab_size=VOCAB)
    assert tokens_of(both.bitmask()) == {1}
    both = TokenRules(inner, allowed=(0, 3), bad_words=(), vocab_size=VOCAB)
    assert tokens_of(both.bitmask()) == tokens_of(inner.bitmask()) and not both.ended
    assert not both.accept(0) and both.problem == inner.problem != ""


def test_a_request_without_rules_has_none() -> None:
    assert rules_of(SamplingParams(), None, vocab_size=VOCAB) is None
    assert rules_of(SamplingParams(bad_token_ids=((1,),)), None, vocab_size=VOCAB) is not None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(allowed_token_ids=(1, VOCAB)), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(1,), regex="a"), "allowed_token_ids"),
        (SamplingParams(bad_token_ids=((1,),), json_schema="{}"), "bad_words"),
        (SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=((1,), (2,))), "bad_words"),
        (SamplingParams(bad_token_ids=((1,),) * 2049), "bad_words"),
    ],
)
def test_what_cannot_be_followed_is_named(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidParam) as refused:
        check_sampling_params(params, vocab_size=VOCAB)
    assert refused.value.field == field
