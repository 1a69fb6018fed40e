"""The interface of grammar backends, and the choice of one (`--grammar-backend`), which imports no other library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.hooks import Grammar
from engine.grammar.json_schema import with_additional
from engine.sampling_params import GrammarSpec
from engine.text.tokenizer import Tokenizer
from service.flags import ConfigError

MAX_WHITESPACE = 16  # a line break and a usual indentation


class GrammarInvalid(ValueError):
    """The grammar does not compile; the one-line message says why."""


# A compiled grammar, which all its requests share: makes a new state before the first token. Cheap.
StartGrammar = Callable[[], Grammar]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """The style of constrained JSON. `any_whitespace`: it has spaces between its parts, `max_whitespace` in a row (None: any).

    `closes_objects`: objects hold no other properties than the schema lists, unless it says so (json_schema.py).
    """

    any_whitespace: bool = True
    max_whitespace: int | None = MAX_WHITESPACE
    closes_objects: bool = True

    def schema(self, schema: Any) -> Any:
        return with_additional(schema, not self.closes_objects)


class Compiler(Protocol):
    """Called from several threads at once."""

    def prepare(self) -> None:
        """Do what takes long for any grammar (the vocabulary); else the first `compile` does it."""

    def compile(self, spec: GrammarSpec) -> StartGrammar:
        """Raises GrammarInvalid."""


def make_compiler(
    backend: str,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
    style: JsonStyle | None = None,
) -> Compiler | None:
    """`backend`: "llguidance" | "xgrammar" | "none", without a tokenizer. Raises ConfigError when its library is missing."""
    if backend == "none":
        return None
    assert tokenizer is not None, "checked (engine/flags/tokenizer.py)"
    make: Callable[..., Compiler]
    try:
        if backend == "xgrammar":
            from engine.grammar.xgrammar_backend import XgrammarCompiler as make
        else:
            from engine.grammar.llguidance_backend import LlguidanceCompiler as make
    except ImportError as error:
        raise ConfigError(
            f"--grammar-backend {backend}: {error}; install it (pip install {backend}) or choose another"
        ) from error
    return make(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids, style=style or JsonStyle())
