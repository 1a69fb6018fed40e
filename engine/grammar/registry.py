"""Chooses the library that compiles grammars (`--grammar-backend`), and imports no other one."""

from collections.abc import Callable, Sequence

from engine.grammar.compiler import Compiler
from engine.text.tokenizer import Tokenizer
from service.flags import ConfigError


def make_compiler(
    backend: str, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], any_whitespace: bool = True
) -> Compiler | None:
    """`backend`: "llguidance" | "xgrammar" | "none". Raises ConfigError when its library is missing."""
    if backend == "none":
        return None
    try:
        make = _BACKENDS[backend]()
    except ImportError as error:
        raise ConfigError(
            f"--grammar-backend {backend}: {error}; install it (pip install {backend}) or choose another"
        ) from error
    return make(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids, any_whitespace=any_whitespace)


def _llguidance() -> Callable[..., Compiler]:
    from engine.grammar.llguidance_backend import LlguidanceCompiler

    return LlguidanceCompiler


def _xgrammar() -> Callable[..., Compiler]:
    from engine.grammar.xgrammar_backend import XgrammarCompiler

    return XgrammarCompiler


_BACKENDS = {"llguidance": _llguidance, "xgrammar": _xgrammar}
