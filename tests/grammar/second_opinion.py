"""A compiler by xgrammar (https://github.com/mlc-ai/xgrammar), with the interface of ours: what it says of the same grammars."""

import json
from collections.abc import Sequence

import numpy as np
import xgrammar as xg

from engine.core.request import StartGrammar
from engine.grammar.compiler import MAX_WHITESPACE, Structure, closed, read_structural_tag
from engine.sampling_params import GrammarInvalid, GrammarSpec
from engine.text.tokenizer import Tokenizer

MAX_NESTING = 100  # of a schema: xgrammar's time grows with the square of it
WORD_BITS = 32


class XgrammarCompiler:
    """`vocab_size`: rows of the model's logits."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], any_whitespace: bool = True
    ) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._any_whitespace = any_whitespace
        tokens = [b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(vocab_size)]
        vocabulary = xg.TokenizerInfo(tokens, xg.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_ids))
        self._compiler = xg.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def prepare(self) -> None:
        """Nothing takes long."""

    def compile(self, spec: GrammarSpec) -> StartGrammar:
        try:
            compiled = self._compiled(spec)
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise GrammarInvalid(" ".join(str(error).split())) from None
        return lambda: XgrammarState(xg.GrammarMatcher(compiled), self._num_words)

    def _compiled(self, spec: GrammarSpec) -> xg.CompiledGrammar:
        match spec.kind:
            case "json_schema":
                schema = json.loads(spec.source)
                _check_depth(schema)
                spaced = self._any_whitespace
                return self._compiler.compile_json_schema(
                    json.dumps(closed(schema)),
                    any_whitespace=spaced,
                    separators=None if spaced else (",", ":"),
                    strict_mode=False,
                    max_whitespace_cnt=MAX_WHITESPACE if spaced else None,
                )
            case "regex":
                return self._compiler.compile_regex(spec.source)
            case "ebnf" if "::=" in spec.source:
                return self._compiler.compile_grammar(spec.source)
            case "ebnf":
                return self._compiler.compile_lark(spec.source)
        tag = read_structural_tag(spec.source)
        tags = [xg.structural_tag.TagFormat(begin=s.begin, content=self._content(s), end=s.end) for s in tag.structures]
        triggered = xg.structural_tag.TriggeredTagsFormat(triggers=tag.triggers, tags=tags)
        return self._compiler.compile_structural_tag(xg.StructuralTag(format=triggered))

    def _content(self, s: Structure) -> xg.structural_tag.Format:
        value = xg.structural_tag.JSONSchemaFormat(json_schema=closed(s.schema), max_whitespace_cnt=MAX_WHITESPACE)
        if not s.after_number:
            return value
        number = xg.structural_tag.RegexFormat(pattern="[0-9]+")
        then = xg.structural_tag.ConstStringFormat(value=s.after_number)
        return xg.structural_tag.SequenceFormat(elements=[number, then, value])


class XgrammarState:
    def __init__(self, matcher: xg.GrammarMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self.problem = ""

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def bitmask(self) -> bytes:
        bits = np.full((1, self._num_words), -1, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(bits)
        return bits.tobytes()

    def forced(self) -> Sequence[int]:
        return ()

    def fork(self) -> "XgrammarState":
        return XgrammarState(self._matcher.fork(), self._num_words)


def _check_depth(schema: object, *, depth: int = 0) -> None:
    """Refuse schemas too deep for xgrammar, which accepts them."""
    if depth > MAX_NESTING:
        raise GrammarInvalid(f"nested deeper than {MAX_NESTING} levels")
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for value in inner:
        _check_depth(value, depth=depth + 1)
