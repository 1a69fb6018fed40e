"""The grammar compiler, by llguidance (https://github.com/guidance-ai/llguidance).

It gets the exact bytes of every token, so every supported tokenizer works.
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
SEVERAL = '{"grammars":'  # start of a grammar that llguidance made from a regex
NO_FORCING = '%llguidance {"no_forcing": true}\n'
NO_TOKEN = ("NoExtension", "NoExtensionBias")
MAX_MESSAGE_CHARS = 300
_CONVERTER_ERRORS = (ValueError, TypeError, LookupError, RecursionError, AssertionError, GbnfToLarkError)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """How constrained JSON is written.

    `any_whitespace`: at most MAX_WHITESPACE in a row. `closes_objects`: see json_schema.py.
    """

    any_whitespace: bool = True
    closes_objects: bool = True

    def schema(self, schema: Any) -> Any:
        return with_additional(schema, not self.closes_objects)


class GrammarCompiler:
    """Compiles for one model, thread-safe. `vocab_size`: rows of its logits."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], style: JsonStyle | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._style = style or JsonStyle()

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, bool]:
        vocabulary = _Vocabulary(self._tokenizer, vocab_size=self._vocab_size, eos_ids=self._eos_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_ids or None), vocabulary.writes_bytes

    def prepare(self) -> None:
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
        first.bitmask()  # raises now for a grammar that cannot start
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
    if not style.any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}"}


class GrammarState:
    """One request. After an error llguidance allows only the end token."""

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
    """The tokenizer protocol of llguidance's TokenizerWrapper."""

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
        """Tokenize forced `text` with the model's tokens if exact, else longest first.

        SentencePiece adds a space.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        exact = b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == text.encode()
        return ids if exact else self._longest_first(text.encode())

    def _longest_first(self, text: bytes) -> list[int]:
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
    """Disable forced text: a word-level vocabulary lacks its parts."""
    if not source.startswith(SEVERAL):
        return NO_FORCING + source.lstrip().removeprefix("%llguidance {}")
    grammars = json.loads(source)
    for grammar in grammars["grammars"]:
        if lark := grammar.get("lark_grammar"):
            grammar["lark_grammar"] = NO_FORCING + lark
    return json.dumps(grammars)


def _one_line(text: str) -> str:
    return " ".join(text.split("<state>")[0].split())[:MAX_MESSAGE_CHARS]
