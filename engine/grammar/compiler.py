"""What a grammar backend offers: llguidance and xgrammar stand behind these two protocols."""

from typing import Protocol

from engine.core.grammar import Grammar
from engine.sampling_params import GrammarSpec


class GrammarInvalid(ValueError):
    """The grammar does not compile; the text says why, in one line."""


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by all requests that ask for it."""

    def start(self) -> Grammar:
        """A new state before the first token. Cheap."""


class Compiler(Protocol):
    """Called from several threads at once."""

    def prepare(self) -> None:
        """What takes long and does not depend on the grammar (the vocabulary); the first `compile` does it otherwise."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises GrammarInvalid."""
