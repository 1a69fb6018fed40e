"""The grammar compiler, by llguidance (https://github.com/guidance-ai/llguidance).

It gets the exact bytes of every token.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine.core.request import StartGrammar
from engine.sampling_params import GrammarInvalid, GrammarSpec
from engine.schema_references import CONDITIONS, NAMED_CONDITIONS, PARTS, Path, local, mapped
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


_SILENCED_BY = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMPOSED_BY = (*PARTS, *CONDITIONS, *NAMED_CONDITIONS, "$ref")


def closed(schema: Any) -> Any:
    """Copy with closed objects, as in OpenAI's strict mode.

    By default JSON Schema allows additional properties, with which a model then fills its answer.
    Objects without listed properties stay open, and so do parts of one object in `allOf`, `if` or a
    `$ref` with `properties`. Raises BadReference; RecursionError if too deep.
    """
    schema = local(schema)
    parts: set[str] = set()  # references to parts of one object, which stay open
    while True:
        closer = _Closer(parts)
        result = closer.close(schema, (), whole=True)
        if closer.parts == parts:
            return result
        parts = closer.parts


class _Closer:
    def __init__(self, parts: set[str]) -> None:
        self._known = parts
        self.parts = set(parts)

    def close(self, schema: Any, path: Path, *, whole: bool) -> Any:
        """Close the objects of a schema. `whole`: no other schema applies to the value."""
        if not isinstance(schema, dict):
            return schema
        whole = whole and "/".join(("#", *path)) not in self._known
        alone = whole and not ("properties" in schema and any(key in schema for key in _COMPOSED_BY))
        if not alone and isinstance(schema.get("$ref"), str):
            self.parts.add(schema["$ref"])
        result = mapped(
            schema, lambda inner, below: self.close(inner, (*path, *below), whole=_speaks(below[0], schema, alone))
        )
        if alone and isinstance(schema.get("properties"), dict) and not any(key in schema for key in _SILENCED_BY):
            result["additionalProperties"] = False
        return result


def _speaks(key: str, schema: dict[str, Any], alone: bool) -> bool:
    if key in PARTS:
        return alone and (key != "allOf" or len(schema[key]) == 1)
    return key not in CONDITIONS and key not in NAMED_CONDITIONS


HEAD = """%llguidance {}
start: (TAGS)* tag_end
tag_end: TAG_TEXT
TAG_TEXT: /(.|\\n)*/
"""


class Structure(msgspec.Struct, kw_only=True):
    """Part of a structural tag. `after_number`: `schema` follows an integer after `begin`."""

    begin: str
    after_number: str = ""
    schema: dict[str, Any] | bool = {}
    end: str = ""


class StructuralTag(msgspec.Struct, kw_only=True):
    structures: list[Structure]
    triggers: list[str]


def read_structural_tag(source: str) -> StructuralTag:
    """Raises GrammarInvalid."""
    try:
        tag = msgspec.json.decode(source, type=StructuralTag)
    except msgspec.MsgspecError as error:
        raise GrammarInvalid(str(error)) from None
    if not tag.structures or not all(tag.triggers):
        raise GrammarInvalid("structures must not be empty, nor may a trigger")
    for structure in tag.structures:
        if not any(map(structure.begin.startswith, tag.triggers)):
            raise GrammarInvalid(f"no trigger begins {structure.begin!r}")
    return tag


def structural_lark(
    source: str, *, special_tokens: Mapping[str, int], schema_of: Callable[[Any], Any] = lambda schema: schema
) -> str:
    """The structural tag as a Lark grammar: triggers in free text force what follows.

    `special_tokens`: ids by name. `schema_of`: transforms schemas. Raises GrammarInvalid. SGLang's
    JSON: {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}]}.
    The grammar (lazy text to a trigger, rest of `begin`, schema, `end`) follows llguidance's
    `StructTag`.
    """
    tag = read_structural_tag(source)
    names = [f"tag_{i}" for i in range(len(tag.structures))]
    rules = [
        _rule(name, structure, tag.triggers, special_tokens, schema=schema_of(structure.schema))
        for name, structure in zip(names, tag.structures, strict=True)
    ]
    return HEAD.replace("TAGS", " | ".join(names), 1) + "\n".join(rules)


def _rule(
    name: str, structure: Structure, triggers: list[str], special_tokens: Mapping[str, int], *, schema: Any
) -> str:
    trigger = max((t for t in triggers if structure.begin.startswith(t)), key=len)
    rest = structure.begin[len(trigger) :]
    number = f"/[0-9]+/ {_text(structure.after_number, special_tokens)}" if structure.after_number else ""
    end = _text(structure.end, special_tokens)
    body = f"{_text(rest, special_tokens)} {number} %json {json.dumps(schema)} {end}"
    if trigger in special_tokens:
        return f"{name}: TAG_TEXT {_text(trigger, special_tokens)} {body}\n"
    return f"{name}_trigger[lazy]: TAG_TEXT {_text(trigger, {})}\n{name}: {name}_trigger {body}\n"


def _text(text: str, special_tokens: Mapping[str, int]) -> str:
    pieces = _pieces(text, special_tokens)
    return " ".join(f"<[{special_tokens[token]}]>" if token else json.dumps(plain) for token, plain in pieces)


def _pieces(text: str, special_tokens: Collection[str]) -> list[tuple[str, str]]:
    names = [re.escape(name) for name in sorted(special_tokens, key=len, reverse=True) if name in text]
    if not names:
        return [("", text)] if text else []
    parts = re.split(f"({'|'.join(names)})", text)
    return [(part, "") if i % 2 else ("", part) for i, part in enumerate(parts) if part]


MAX_WHITESPACE = 16  # characters: a line break and a usual indentation
SILENT = 0
SEVERAL = '{"grammars":'  # start of a grammar that llguidance made from a regex
NO_FORCING = '%llguidance {"no_forcing": true}\n'
NO_TOKEN = ("NoExtension", "NoExtensionBias")
MAX_MESSAGE_CHARS = 300
_CONVERTER_ERRORS = (ValueError, TypeError, LookupError, RecursionError, AssertionError, GbnfToLarkError)


class GrammarCompiler:
    """Compiles for one model, thread-safe.

    `vocab_size`: rows of its logits. `any_whitespace`: JSON has up to MAX_WHITESPACE in a row.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], any_whitespace: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._any_whitespace = any_whitespace

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
                schema = closed(json.loads(spec.source))
                return LLMatcher.grammar_from_json_schema(schema, overrides=self._options())
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
        schema = {} if schema is True else closed(schema)
        return {**schema, "x-guidance": self._options()} if isinstance(schema, dict) else schema

    def _options(self) -> "JsonCompileOptions":
        if not self._any_whitespace:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}"}


class GrammarState:
    """After an error llguidance allows only the end token."""

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
