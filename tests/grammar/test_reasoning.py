"""A grammar behind reasoning, and a budget for the reasoning: masks token by token; what forks and forced tokens are."""

from collections.abc import Callable

import pytest

from engine.core.request import Grammar
from engine.grammar.token_rules import TokenRules
from tests.grammar.compilers import END, EOS, VOCAB_SIZE, gate, gates, ids_of, next_of, ours, say


def state(opening: str, *, regex: str | None = "[ab]+c", budget: int | None = None, start: str = "<think>") -> Grammar:
    return gates().behind(gate(opening, budget=budget, start=start), None if regex is None else ours(regex))


def test_the_grammar_begins_behind_the_reasoning() -> None:
    grammar = state("open")
    for character in "x </think":
        assert next_of(grammar) == "*" and not grammar.ended
        assert say(grammar, character)
    assert say(grammar, ">")
    assert next_of(grammar) == "ab"
    assert say(grammar, "ab")
    assert next_of(grammar) == "abc"
    assert say(grammar, "c")
    assert grammar.ended
    assert not state("closed").accept(ord("x"))


def test_a_budget_forces_the_end_once_it_is_spent() -> None:
    grammar = state("open", budget=3)
    said = ""
    for character in "xyz" + END:
        assert next_of(grammar) == ("*" if len(said) < 3 else character)
        assert say(grammar, character)
        said += character
    assert next_of(grammar) == "ab"
    assert next_of(state("open", budget=0)) == "<"


@pytest.mark.parametrize("regex", [None, "[ab]+c"])
def test_reasoning_that_ends_by_itself_spends_no_budget(regex: str | None) -> None:
    grammar = state("open", regex=regex, budget=9)
    assert say(grammar, "x" + END)
    assert next_of(grammar) == ("*" if regex is None else "ab")
    assert grammar.bitmask() == grammar.bitmask() and not grammar.ended and not grammar.problem


def test_without_a_grammar_the_answer_stays_free() -> None:
    grammar = state("undecided", regex=None, budget=2)
    assert say(grammar, "<think>")
    assert next_of(grammar) == "*"
    assert say(grammar, "ab")
    assert next_of(grammar) == "<"
    assert say(grammar, END + "anything <think>")
    assert next_of(grammar) == "*"
    plain = state("undecided", regex=None, budget=0)
    assert say(plain, "no reasoning")
    assert next_of(plain) == "*"


def test_an_answer_may_open_the_reasoning_itself_or_begin_at_once() -> None:
    """`!` stands for the one token that opens it."""
    reasons = state("undecided", start="!")
    assert next_of(reasons) == "!ab"
    assert say(reasons, "!")
    assert next_of(reasons) == "*"
    assert say(reasons, f"hm{END}ac")
    assert reasons.ended
    at_once = state("undecided", start="!")
    assert say(at_once, "ac")
    assert at_once.ended


def test_where_the_first_token_cannot_tell_the_grammar_begins_at_once() -> None:
    assert next_of(state("undecided", start="<think>")) == "ab"


REGEX = "[ab]+cde[ab]"
MAKE: dict[str, Callable[[], Grammar]] = {
    "alone": lambda: ours(REGEX),
    "reasoning": lambda: gates().behind(gate(budget=2), ours(REGEX)),
    "token rules": lambda: TokenRules(ours(REGEX), allowed=(), bad_words=[ids_of("ba")], vocab_size=VOCAB_SIZE),
}
SAID = {"reasoning": "xy" + END + "ab", "token rules": "ab"}


@pytest.mark.parametrize("name", MAKE)
def test_a_fork_leaves_the_grammar_where_it_is(name: str) -> None:
    """At every token: the fork goes on to the end, and the grammar says what it would have said."""
    alone, forked = MAKE[name](), MAKE[name]()
    said = ids_of(SAID.get(name, "ab") + "cdea")
    for i, token in enumerate(said):
        fork = forked.fork()
        assert all(fork.accept(t) for t in said[i:]) and fork.ended
        wrong = forked.fork()
        wrong.accept(EOS)
        assert not forked.ended and forked.bitmask() == alone.bitmask() and not forked.problem
        assert alone.accept(token) and forked.accept(token)
    assert forked.ended


@pytest.mark.parametrize("name", MAKE)
def test_forced_tokens_are_all_that_may_come(name: str) -> None:
    grammar, num_forced = MAKE[name](), 0
    for token in ids_of(SAID.get(name, "ab") + "cdea"):
        fork = grammar.fork()
        for forced in fork.forced():
            mask = int.from_bytes(fork.bitmask(), "little")
            assert mask == 1 << forced and fork.accept(forced)
            num_forced += 1
        assert grammar.accept(token)
    assert num_forced > 0
