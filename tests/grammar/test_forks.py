"""Drafts walk a copy of a grammar; what it forces is all that its masks allow."""

from collections.abc import Callable

import pytest

from engine.core.hooks import Grammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.reasoning import ReasoningGates
from engine.grammar.token_rules import TokenRules
from engine.sampling_params import GrammarSpec, ReasoningGate
from tests.frontend.conftest import byte_tokenizer

VOCAB_SIZE, EOS = 260, 256
END = "</think>"


def compiled() -> Grammar:
    compiler = GrammarCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE, eos_ids=[EOS])
    return compiler.compile(GrammarSpec("regex", "[ab]+cde[ab]"))()


def reasoning(inner: Grammar) -> Grammar:
    gate = ReasoningGate(start="<think>", end=END, forced=END, opening="open", budget=2)
    return ReasoningGates(byte_tokenizer(), vocab_size=VOCAB_SIZE).behind(gate, inner)


def ruled(inner: Grammar) -> Grammar:
    return TokenRules(inner, allowed=(), bad_words=[ids("ba")], vocab_size=VOCAB_SIZE)


MAKE: dict[str, Callable[[], Grammar]] = {
    "alone": compiled,
    "reasoning": lambda: reasoning(compiled()),
    "token rules": lambda: ruled(compiled()),
}
SAID = {"reasoning": "xy" + END + "ab", "token rules": "ab"}


def ids(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", MAKE)
def test_a_fork_leaves_the_grammar_where_it_is(name: str) -> None:
    """At every token: the fork goes on to the end, and the grammar says what it would have said."""
    alone, forked = MAKE[name](), MAKE[name]()
    said = ids(SAID.get(name, "ab") + "cdea")
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
    for token in ids(SAID.get(name, "ab") + "cdea"):
        fork = grammar.fork()
        for forced in fork.forced():
            mask = int.from_bytes(fork.bitmask(), "little")
            assert mask == 1 << forced and fork.accept(forced)
            num_forced += 1
        assert grammar.accept(token)
    assert num_forced > 0
