"""Drafts walk a copy of a grammar; what it forces is all that its masks allow."""

from collections.abc import Callable

import pytest

from engine.core.hooks import Grammar
from engine.grammar.token_rules import TokenRules
from tests.grammar.compilers import END, EOS, VOCAB_SIZE, gate, gates, ids_of, ours

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
