"""The product's compiler and the second opinion on it, over one tokenizer of bytes, and what a grammar accepts by either."""

from collections.abc import Callable
from typing import Any

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.queue import Compiler
from engine.sampling_params import GrammarSpec
from engine.text.tokenizer import Tokenizer
from tests.grammar.second_opinion import XgrammarCompiler

VOCAB_SIZE, EOS = 260, 256  # of the tokenizer of bytes
COMPILERS: dict[str, Callable[..., Compiler]] = {"llguidance": GrammarCompiler, "xgrammar": XgrammarCompiler}


def compiler_of(name: str, tokenizer: Tokenizer, **options: Any) -> Compiler:
    return COMPILERS[name](tokenizer, **{"vocab_size": VOCAB_SIZE, "eos_ids": [EOS], **options})


def accepts(compiler: Compiler, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    """Whether `text` and then the end may be said, token by token, each allowed by the mask before it."""
    state = compiler.compile(spec)()
    for token in tokenizer.encode(text, add_special_tokens=False):
        mask = state.bitmask()
        assert len(mask) == 4 * -(-VOCAB_SIZE // 32)
        allowed = bool(mask[token // 8] >> token % 8 & 1)
        assert state.accept(token) == allowed
        if not allowed:
            return False
    return state.ended or bool(state.bitmask()[EOS // 8] >> EOS % 8 & 1)
