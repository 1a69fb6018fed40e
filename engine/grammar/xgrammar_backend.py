"""Grammars by xgrammar (https://github.com/mlc-ai/xgrammar): masks are cheaper, hard schemas take seconds to compile.

Its package imports torch and transformers, so only the scheduler's process imports this module, and only for
`--grammar-backend xgrammar`. It receives the exact bytes of every token from our own tokenizer.
"""

import json
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import xgrammar as xg

from engine.grammar.compiler import GrammarInvalid, JsonStyle, StartGrammar
from engine.grammar.structural import Structure, read_structural_tag, special_in
from engine.sampling_params import GrammarSpec
from engine.text.tokenizer import Tokenizer

MAX_NESTING = 100  # of a schema: xgrammar's time grows with the square of it
MAX_MESSAGE_CHARS = 300
WORD_BITS = 32
NO_TOKEN = "no token of the vocabulary can follow"


class XgrammarCompiler:
    """`vocab_size`: rows of the model's logits."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], style: JsonStyle) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._style = style

    @cached_property
    def _compiler(self) -> xg.GrammarCompiler:
        return xg.GrammarCompiler(self._vocabulary(), max_threads=1, cache_enabled=False)

    def prepare(self) -> None:
        _ = self._compiler

    def compile(self, spec: GrammarSpec) -> StartGrammar:
        compiler = self._compiler
        try:
            compiled = self._compiled(compiler, spec)
        except GrammarInvalid:
            raise
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise GrammarInvalid(_one_line(str(error) or type(error).__name__)) from None
        not_end = ~_mask_of(self._eos_ids, -(-self._vocab_size // WORD_BITS))

        def start() -> XgrammarState:
            return XgrammarState(xg.GrammarMatcher(compiled), not_end)

        if not start().mask().any():
            raise GrammarInvalid(f"no answer of this model can begin so ({NO_TOKEN})")
        return start

    def _compiled(self, compiler: xg.GrammarCompiler, spec: GrammarSpec) -> xg.CompiledGrammar:
        match spec.kind:
            case "json_schema":
                schema = msgspec.json.decode(spec.source)
                _check_schema(schema)
                spaced = self._style.any_whitespace
                return compiler.compile_json_schema(
                    json.dumps(self._style.schema(schema)),
                    any_whitespace=spaced,
                    separators=None if spaced else (",", ":"),
                    strict_mode=False,
                    max_whitespace_cnt=self._max_whitespace,
                )
            case "regex":
                return compiler.compile_regex(spec.source)
            case "ebnf":
                gbnf = "::=" in spec.source
                return compiler.compile_grammar(spec.source) if gbnf else compiler.compile_lark(spec.source)
            case "structural_tag":
                return compiler.compile_structural_tag(self._structural_tag(spec.source))
        raise GrammarInvalid(f"{spec.kind} is no kind of grammar")

    def _structural_tag(self, source: str) -> xg.StructuralTag:
        tag = read_structural_tag(source)
        if token := special_in(tag, {self._tokenizer.token_text(i) for i in self._tokenizer.special_ids}):
            raise GrammarInvalid(
                f"xgrammar cannot write the special token {token!r}; start the server with --grammar-backend llguidance"
            )
        tags = [
            xg.structural_tag.TagFormat(
                begin=s.begin,
                content=self._content(s),
                end=s.end,
            )
            for s in tag.structures
        ]
        return xg.StructuralTag(format=xg.structural_tag.TriggeredTagsFormat(triggers=tag.triggers, tags=tags))

    def _content(self, s: Structure) -> xg.structural_tag.Format:
        value = xg.structural_tag.JSONSchemaFormat(
            json_schema=self._style.schema(s.schema), max_whitespace_cnt=self._max_whitespace
        )
        if not s.after_number:
            return value
        number = xg.structural_tag.RegexFormat(pattern="[0-9]+")
        then = xg.structural_tag.ConstStringFormat(value=s.after_number)
        return xg.structural_tag.SequenceFormat(elements=[number, then, value])

    @property
    def _max_whitespace(self) -> int | None:
        return self._style.max_whitespace if self._style.any_whitespace else None

    def _vocabulary(self) -> xg.TokenizerInfo:
        """Special tokens have no text: no grammar holds them, and an end token stands for the end."""
        silent = self._tokenizer.special_ids
        tokens = [b"" if i in silent else self._tokenizer.token_bytes(i) for i in range(self._vocab_size)]
        return xg.TokenizerInfo(
            tokens, xg.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=self._eos_ids or None
        )


class XgrammarState:
    """One request's state. `not_end`: mask of all tokens that are no end token."""

    def __init__(self, matcher: xg.GrammarMatcher, not_end: np.ndarray) -> None:
        self._matcher = matcher
        self._not_end = not_end
        self._bits: np.ndarray | None = None  # of the present state, once computed
        self.problem = ""

    @property
    def ended(self) -> bool:
        if self.problem:
            return False
        if self._matcher.is_terminated():
            return True
        return self._matcher.is_completed() and not bool((self.mask() & self._not_end).any())

    def accept(self, token: int) -> bool:
        fits = not self.problem and not self._matcher.is_terminated() and self._matcher.accept_token(token)
        if not fits and not self.problem:
            self.problem = f"token {token} does not fit" if self.mask().any() else NO_TOKEN
        self._bits = None
        return fits

    def bitmask(self) -> bytes:
        """Where no token may follow: all of them, so that one comes and is refused."""
        mask = self.mask()
        return mask.tobytes() if mask.any() else b"\xff" * mask.nbytes

    def forced(self) -> Sequence[int]:
        """xgrammar knows forced text, and not how the model would cut it into tokens."""
        return ()

    def fork(self) -> "XgrammarState":
        forked = XgrammarState(self._matcher.fork(), self._not_end)
        forked.problem = self.problem
        return forked

    def mask(self) -> np.ndarray:
        """Mask of the present state; after the end only an end token may follow."""
        if self._bits is None:
            bits = np.full((1, len(self._not_end)), -1, dtype=np.int32)
            if self._matcher.is_terminated():
                bits[0] = ~self._not_end
            else:
                self._matcher.fill_next_token_bitmask(bits)
            self._bits = bits[0]
        return self._bits


def _mask_of(tokens: Sequence[int], num_words: int) -> np.ndarray:
    bits = np.zeros(num_words, dtype=np.uint32)
    for token in tokens:
        bits[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
    return bits.view(np.int32)


def _check_schema(schema: object, *, depth: int = 0) -> None:
    """Refuse schemas too deep for xgrammar, which accepts them."""
    if depth > MAX_NESTING:
        raise GrammarInvalid(f"nested deeper than {MAX_NESTING} levels")
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for value in inner:
        _check_schema(value, depth=depth + 1)


def _one_line(text: str) -> str:
    """The message without the leading place in xgrammar's source."""
    text = " ".join(text.split())
    place, found, rest = text.partition(".cc:")
    if found and " " not in place.partition("] ")[2]:
        text = rest.partition(": ")[2]
    return text[:MAX_MESSAGE_CHARS]
