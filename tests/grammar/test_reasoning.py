"""A grammar behind reasoning, and a budget for the reasoning: masks token by token, with a real compiler and without one."""

import pytest

from engine.core.hooks import Grammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.reasoning import ReasoningGates
from engine.sampling_params import GrammarSpec, ReasoningGate
from tests.frontend.conftest import byte_tokenizer

VOCAB_SIZE, EOS, START = 260, 256, 257
END = "</think>"


def gate(opening: str, *, budget: int | None = None, start: str = "<think>") -> ReasoningGate:
    return ReasoningGate(start=start, end=END, forced=END, opening=opening, budget=budget)


def state(opening: str, *, regex: str | None = "[ab]+c", budget: int | None = None, start: str = "<think>") -> Grammar:
    inner = None
    if regex is not None:
        compiler = GrammarCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE, eos_ids=[EOS])
        inner = compiler.compile(GrammarSpec("regex", regex))()
    return ReasoningGates(byte_tokenizer(), vocab_size=VOCAB_SIZE).behind(
        gate(opening, budget=budget, start=start), inner
    )


def allowed(grammar: Grammar) -> str:
    """The characters that may come next; "*" for all."""
    mask = grammar.bitmask()
    assert len(mask) == 4 * -(-VOCAB_SIZE // 32)
    ids = [i for i in range(VOCAB_SIZE) if mask[i // 8] >> i % 8 & 1]
    return "*" if len(ids) == VOCAB_SIZE else byte_tokenizer().decode(ids, skip_special_tokens=False)


def say(grammar: Grammar, text: str) -> None:
    for token in byte_tokenizer().encode(text, add_special_tokens=False):
        assert grammar.accept(token), grammar.problem


def test_the_grammar_begins_behind_the_reasoning() -> None:
    grammar = state("open")
    for character in "x </think":
        assert allowed(grammar) == "*" and not grammar.ended
        say(grammar, character)
    say(grammar, ">")
    assert allowed(grammar) == "ab"
    say(grammar, "ab")
    assert allowed(grammar) == "abc"
    say(grammar, "c")
    assert grammar.ended
    assert not state("closed").accept(ord("x"))


def test_a_budget_forces_the_end_once_it_is_spent() -> None:
    grammar = state("open", budget=3)
    said = ""
    for character in "xyz" + END:
        assert allowed(grammar) == ("*" if len(said) < 3 else character)
        say(grammar, character)
        said += character
    assert allowed(grammar) == "ab"
    assert allowed(state("open", budget=0)) == "<"


@pytest.mark.parametrize("regex", [None, "[ab]+c"])
def test_reasoning_that_ends_by_itself_spends_no_budget(regex: str | None) -> None:
    grammar = state("open", regex=regex, budget=9)
    say(grammar, "x" + END)
    assert allowed(grammar) == ("*" if regex is None else "ab")
    assert grammar.bitmask() == grammar.bitmask() and not grammar.ended and not grammar.problem


def test_without_a_grammar_the_answer_stays_free() -> None:
    grammar = state("undecided", regex=None, budget=2)
    say(grammar, "<think>")
    assert allowed(grammar) == "*"
    say(grammar, "ab")
    assert allowed(grammar) == "<"
    say(grammar, END + "anything <think>")
    assert allowed(grammar) == "*"
    plain = state("undecided", regex=None, budget=0)
    say(plain, "no reasoning")
    assert allowed(plain) == "*"


def test_an_answer_may_open_the_reasoning_itself_or_begin_at_once() -> None:
    """`!` stands for the one token that opens it."""
    reasons = state("undecided", start="!")
    assert sorted(allowed(reasons)) == ["!", "a", "b"]
    say(reasons, "!")
    assert allowed(reasons) == "*"
    say(reasons, f"hm{END}ac")
    assert reasons.ended
    at_once = state("undecided", start="!")
    say(at_once, "ac")
    assert at_once.ended


def test_where_the_first_token_cannot_tell_the_grammar_begins_at_once() -> None:
    assert allowed(state("undecided", start="<think>")) == "ab"
