"""The product's compiler and the second opinion on it, over one tokenizer of bytes, and what a grammar accepts by either."""

from collections.abc import Callable, Iterable
from typing import Any

from engine.core.request import Grammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.queue import Compiler
from engine.grammar.reasoning import ReasoningGates
from engine.sampling_params import GrammarSpec, ReasoningGate
from engine.text.tokenizer import Tokenizer
from tests.frontend.conftest import byte_tokenizer
from tests.grammar.second_opinion import XgrammarCompiler

VOCAB_SIZE, EOS = 260, 256  # of the tokenizer of bytes
END = "</think>"
COMPILERS: dict[str, Callable[..., Compiler]] = {"llguidance": GrammarCompiler, "xgrammar": XgrammarCompiler}


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text, add_special_tokens=False))


def ours(regex: str) -> Grammar:
    """The state of a regex, by the product's compiler."""
    return compiler_of("llguidance").compile(GrammarSpec("regex", regex))()


def gate(opening: str = "open", *, budget: int | None = None, start: str = "<think>") -> ReasoningGate:
    return ReasoningGate(start=start, end=END, forced=END, opening=opening, budget=budget)


def gates() -> ReasoningGates:
    return ReasoningGates(byte_tokenizer(), vocab_size=VOCAB_SIZE)


def in_mask(mask: bytes, size: int = VOCAB_SIZE) -> list[int]:
    assert len(mask) == 4 * -(-VOCAB_SIZE // 32) or size != VOCAB_SIZE
    return [token for token in range(size) if mask[token // 8] >> token % 8 & 1]


def next_of(grammar: Grammar) -> str:
    """The characters that may come next, in order; "*" for all."""
    ids = in_mask(grammar.bitmask())
    return "*" if len(ids) == VOCAB_SIZE else "".join(sorted(byte_tokenizer().decode(ids, skip_special_tokens=False)))


def say(grammar: Grammar, text: str) -> bool:
    return all(map(grammar.accept, ids_of(text)))


def compiler_of(name: str, tokenizer: Tokenizer | None = None, **options: Any) -> Compiler:
    return COMPILERS[name](tokenizer or byte_tokenizer(), **{"vocab_size": VOCAB_SIZE, "eos_ids": [EOS], **options})


def accepts(compiler: Compiler, spec: GrammarSpec, text: str) -> bool:
    """Whether `text` and then the end may be said, token by token, each allowed by the mask before it."""
    state = compiler.compile(spec)()
    for token in ids_of(text):
        allowed = token in in_mask(state.bitmask())
        assert state.accept(token) == allowed
        if not allowed:
            return False
    return state.ended or EOS in in_mask(state.bitmask())


def check_texts(compiler: Compiler, spec: GrammarSpec, *, good: Iterable[str], bad: Iterable[str]) -> None:
    assert [text for text in good if not accepts(compiler, spec, text)] == []
    assert [text for text in bad if accepts(compiler, spec, text)] == []
