"""The interface of grammar backends (llguidance, xgrammar)."""

from typing import Protocol

from engine.core.grammar import Grammar
from engine.sampling_params import GrammarSpec


class GrammarInvalid(ValueError):
    """The grammar does not compile; the one-line message says why."""


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by all requests that ask for it."""

    def start(self) -> Grammar:
        """A new state before the first token. Cheap."""


class Compiler(Protocol):
    """Called from several threads at once."""

    def prepare(self) -> None:
        """Do what takes long for any grammar (the vocabulary); else the first `compile` does it."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises GrammarInvalid."""
