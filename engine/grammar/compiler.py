"""The compiler of grammars, by llguidance (https://github.com/guidance-ai/llguidance): no torch, milliseconds, bounded work.

It receives the exact bytes of every token from our own tokenizer, so every tokenizer that serves text works.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine.core.hooks import StartGrammar
from engine.grammar.json_schema import with_additional
from engine.grammar.structural import structural_lark
from engine.sampling_params import GrammarInvalid, GrammarSpec
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_WHITESPACE = 16  # characters: a line break and a usual indentation
SILENT = 0
SEVERAL = '{"grammars":'  # how llguidance begins a grammar that it made from a regex
NO_FORCING = '%llguidance {"no_forcing": true}\n'
NO_TOKEN = ("NoExtension", "NoExtensionBias")
MAX_MESSAGE_CHARS = 300
_CONVERTER_ERRORS = (ValueError, TypeError, LookupError, RecursionError, AssertionError, GbnfToLarkError)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """The style of constrained JSON. `any_whitespace`: it has spaces between its parts, at most MAX_WHITESPACE in a row.

    `closes_objects`: objects hold no other properties than the schema lists, unless it says so (json_schema.py).
    """

    any_whitespace: bool = True
    closes_objects: bool = True

    def schema(self, schema: Any) -> Any:
        return with_additional(schema, not self.closes_objects)


class GrammarCompiler:
    """Compiles for one model. `vocab_size`: rows of its logits. Called from several threads at once."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], style: JsonStyle | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._style = style or JsonStyle()

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, bool]:
        """Of the model, and whether it writes every byte."""
        vocabulary = _Vocabulary(self._tokenizer, vocab_size=self._vocab_size, eos_ids=self._eos_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_ids or None), vocabulary.writes_bytes

    def prepare(self) -> None:
        """Read the vocabulary, which takes long; else the first `compile` does."""
        _ = self._vocabulary

    def compile(self, spec: GrammarSpec) -> StartGrammar:
        """Raises GrammarInvalid."""
        vocabulary, writes_bytes = self._vocabulary
        try:
            source = self._source(spec)
        except GrammarInvalid:
            raise
        except _CONVERTER_ERRORS as error:
            raise GrammarInvalid(_one_line(str(error) or type(error).__name__)) from None
        matcher = LLMatcher(vocabulary, source if writes_bytes else _without_forcing(source), log_level=SILENT)
        if matcher.is_error():
            raise GrammarInvalid(_one_line(matcher.get_error()))

        def start() -> GrammarState:
            return GrammarState(matcher.deep_copy())

        first = start()
        first.bitmask()  # makes an impossible beginning the client's error now, not a failure later
        if first.problem:
            raise GrammarInvalid(f"no answer of this model can begin so ({first.problem})")
        return start

    def _source(self, spec: GrammarSpec) -> str:
        match spec.kind:
            case "json_schema":
                schema = self._style.schema(json.loads(spec.source))
                return LLMatcher.grammar_from_json_schema(schema, overrides=_options(self._style))
            case "regex":
                return LLMatcher.grammar_from_regex(spec.source)
            case "ebnf":
                return LLMatcher.grammar_from_lark(any_to_lark(spec.source))
            case "structural_tag":
                special = {self._tokenizer.token_text(i): i for i in sorted(self._tokenizer.special_ids)}
                return LLMatcher.grammar_from_lark(
                    structural_lark(spec.source, special_tokens=special, schema_of=self._tag_schema)
                )
        raise GrammarInvalid(f"{spec.kind} is no kind of grammar")

    def _tag_schema(self, schema: Any) -> Any:
        schema = {} if schema is True else self._style.schema(schema)
        return {**schema, "x-guidance": _options(self._style)} if isinstance(schema, dict) else schema


def _options(style: JsonStyle) -> "JsonCompileOptions":
    """llguidance's names for the style."""
    if not style.any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}"}


class GrammarState:
    """One request's state. In an error (a token that does not fit, a limit) llguidance allows the end token alone."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def problem(self) -> str:
        text = _one_line(self._matcher.get_error())
        return "no token of the vocabulary can follow" if text in NO_TOKEN else text

    def accept(self, token: int) -> bool:
        return self._matcher.consume_token(token) and not self._matcher.is_error()

    def bitmask(self) -> bytes:
        return self._matcher.compute_bitmask()

    def forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()

    def fork(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy())


class _Vocabulary:
    """The tokenizer that llguidance's TokenizerWrapper expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else vocab_size - 1
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)

        self._ids = {b: i for i, b in reversed(list(enumerate(self.tokens))) if b and i not in tokenizer.special_ids}
        self._longest = max(map(len, self._ids), default=1)

    @property
    def writes_bytes(self) -> bool:
        return all(bytes([b]) in self._ids for b in range(0x20, 0x7F))

    def __call__(self, text: str) -> list[int]:
        """The model's own tokens for forced `text` if they spell it exactly, else the longest tokens that fit.

        SentencePiece adds a leading space, a word-level tokenizer has an unknown token: neither spells `text`.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        exact = b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == text.encode()
        return ids if exact else self._longest_first(text.encode())

    def _longest_first(self, text: bytes) -> list[int]:
        """Up to the first byte that no token begins with."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self._ids), 0)
            if size == 0:
                break
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids


def _without_forcing(source: str) -> str:
    """Forbid forced text: its parts are tokenized before its end is known, and a word-level vocabulary lacks them."""
    if not source.startswith(SEVERAL):
        return NO_FORCING + source.lstrip().removeprefix("%llguidance {}")
    grammars = json.loads(source)
    for grammar in grammars["grammars"]:
        if lark := grammar.get("lark_grammar"):
            grammar["lark_grammar"] = NO_FORCING + lark
    return json.dumps(grammars)


def _one_line(text: str) -> str:
    return " ".join(text.split("<state>")[0].split())[:MAX_MESSAGE_CHARS]
