"""A grammar behind reasoning, and a budget for the reasoning: masks token by token, with a real compiler and without one."""

import pytest

from engine.core.hooks import Grammar
from tests.grammar.compilers import END, gate, gates, next_of, ours, say


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
