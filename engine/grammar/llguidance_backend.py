"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): no torch, compiles in milliseconds, bounded work.

Owns the view of the vocabulary that llguidance works on: the exact bytes of every token, from our own tokenizer, so that
every tokenizer that serves text also serves grammars.
"""

import threading
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine.frontend.tokenizer import Tokenizer
from engine.grammar.compiler import GrammarInvalid
from engine.grammar.structural import structural_lark
from engine.sampling_params import GrammarSpec

SILENT = 0
MAX_MESSAGE_CHARS = 300


class LlguidanceCompiler:
    """`vocab_size`: rows of the model's logits. `any_whitespace`: JSON may have spaces between its parts."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], any_whitespace: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._any_whitespace = any_whitespace
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def prepare(self) -> None:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()

    def compile(self, spec: GrammarSpec) -> "LlguidanceGrammar":
        self.prepare()
        assert self._vocabulary is not None
        try:
            source = self._source(spec)
        except GrammarInvalid:
            raise
        except (
            ValueError,
            TypeError,
            LookupError,
            RecursionError,
            AssertionError,
            GbnfToLarkError,
        ) as error:  # of the converters
            raise GrammarInvalid(_one_line(str(error) or type(error).__name__)) from None
        matcher = LLMatcher(self._vocabulary, source, log_level=SILENT)
        if matcher.is_error():
            raise GrammarInvalid(_one_line(matcher.get_error()))
        return LlguidanceGrammar(matcher)

    def _source(self, spec: GrammarSpec) -> str:
        match spec.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(
                    spec.source, overrides={"whitespace_flexible": self._any_whitespace}
                )
            case "regex":
                return LLMatcher.grammar_from_regex(spec.source)
            case "ebnf":
                return LLMatcher.grammar_from_lark(any_to_lark(spec.source))
            case "structural_tag":
                special = {self._tokenizer.token_text(i) for i in self._tokenizer.special_ids}
                return LLMatcher.grammar_from_lark(structural_lark(spec.source, special_tokens=special))
        raise GrammarInvalid(f"{spec.kind} is no kind of grammar")

    def _load_vocabulary(self) -> LLTokenizer:
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, vocab_size=self._vocab_size, eos_ids=self._eos_ids)),
            eos_token=self._eos_ids or None,
        )


class LlguidanceGrammar:
    """A compiled grammar, never advanced itself."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> "LlguidanceState":
        return LlguidanceState(self._matcher.deep_copy())


class LlguidanceState:
    """One request's state. In an error (a token that does not fit, a limit) llguidance allows the end token alone."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def problem(self) -> str:
        return _one_line(self._matcher.get_error())

    def accept(self, token: int) -> bool:
        return self._matcher.consume_token(token) and not self._matcher.is_error()

    def bitmask(self) -> bytes:
        return self._matcher.compute_bitmask()


class _Vocabulary:
    """What llguidance's TokenizerWrapper asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else vocab_size - 1
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _one_line(text: str) -> str:
    return " ".join(text.split("<state>")[0].split())[:MAX_MESSAGE_CHARS]
