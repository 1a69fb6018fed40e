"""Sampling parameters with SGLang's names, ranges and defaults."""

import math

import msgspec

TOP_K_ALL = -1
MAX_TOP_K = 2**31 - 1
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_REGEXES = 8
MAX_STOP_REGEX_CHARS = 1024
GREEDY_BELOW_TEMPERATURE = 1e-6
GRAMMAR_KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
MAX_GRAMMAR_CHARS = 256 << 10
MAX_BAD_WORDS = 2048  # token sequences; most words have two


class InvalidParam(ValueError):
    """A user's value that cannot be honoured."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class GrammarInvalid(ValueError):
    """One-line message."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """`kind`: one of GRAMMAR_KINDS; `source`: schema, pattern or grammar."""

    kind: str
    source: str


class ReasoningGate(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning before the answer; a grammar starts after `end`.

    `opening`: see engine/text/reasoning.py. After `budget` tokens, the text `forced` ends it.
    """

    start: str
    end: str
    forced: str
    opening: str
    budget: int | None = None


class TextParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of an answer's text. Stops are cut off, unless `no_stop_trim`."""

    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True


class SamplingParams(TextParams, frozen=True, kw_only=True, omit_defaults=True):
    """A sample depends only on (`seed`, position, logits); the frontend sets a missing seed.

    At most one of `json_schema`, `regex`, `ebnf` (GBNF or Lark), `structural_tag` constrains the
    answer, after `reasoning`. `max_new_tokens`: default up to the context. `allowed_token_ids`:
    empty for all; `bad_token_ids`: banned sequences.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    reasoning: ReasoningGate | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1

    @property
    def grammar(self) -> GrammarSpec | None:
        return next((GrammarSpec(k, s) for k in GRAMMAR_KINDS if (s := getattr(self, k)) is not None), None)

    @property
    def has_token_rules(self) -> bool:
        return bool(self.allowed_token_ids or self.bad_token_ids)

    @property
    def penalized(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


def check_sampling_params(p: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidParam for the first value outside its range."""
    if p.max_new_tokens is not None:
        _require(p.max_new_tokens >= 0, "max_new_tokens", f"must be at least 0, got {p.max_new_tokens}")
    _require(p.min_new_tokens >= 0, "min_new_tokens", f"must be at least 0, got {p.min_new_tokens}")
    if p.max_new_tokens is not None:
        _require(
            p.min_new_tokens <= p.max_new_tokens,
            "min_new_tokens",
            f"must not exceed max_new_tokens ({p.max_new_tokens}), got {p.min_new_tokens}",
        )
    _in_range("temperature", p.temperature, 0.0, math.inf)
    _require(math.isfinite(p.temperature), "temperature", "must be finite")
    _in_range("top_p", p.top_p, 0.0, 1.0)
    _require(p.top_p > 0.0, "top_p", "must be greater than 0")
    _require(
        p.top_k == TOP_K_ALL or 1 <= p.top_k <= MAX_TOP_K,
        "top_k",
        f"must be -1 (off) or between 1 and {MAX_TOP_K}, got {p.top_k}",
    )
    _in_range("min_p", p.min_p, 0.0, 1.0)
    _in_range("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    _in_range("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _in_range("repetition_penalty", p.repetition_penalty, 0.0, 2.0)
    _require(p.repetition_penalty > 0.0, "repetition_penalty", "must be greater than 0")
    _require(1 <= p.n <= 128, "n", f"must be between 1 and 128, got {p.n}")
    if p.seed is not None:
        _require(-(2**63) <= p.seed < 2**63, "seed", "must fit in 64 bits")
    _require(len(p.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings, got {len(p.stop)}")
    fits = all(0 < len(s) <= MAX_STOP_STRING_CHARS for s in p.stop)
    _require(fits, "stop", f"strings must have 1 to {MAX_STOP_STRING_CHARS} characters")
    count = len(p.stop_regex)
    _require(count <= MAX_STOP_REGEXES, "stop_regex", f"at most {MAX_STOP_REGEXES} patterns, got {count}")
    fits = all(0 < len(s) <= MAX_STOP_REGEX_CHARS for s in p.stop_regex)
    _require(fits, "stop_regex", f"patterns must have 1 to {MAX_STOP_REGEX_CHARS} characters")
    for t in p.stop_token_ids:
        _require(0 <= t < vocab_size, "stop_token_ids", f"{t} is not a token id (0 to {vocab_size - 1})")
    for t, bias in p.logit_bias.items():
        _require(0 <= t < vocab_size, "logit_bias", f"{t} is not a token id (0 to {vocab_size - 1})")
        _in_range("logit_bias", bias, -100.0, 100.0)
    for t in p.allowed_token_ids:
        _require(0 <= t < vocab_size, "allowed_token_ids", f"{t} is not a token id (0 to {vocab_size - 1})")
    count = len(p.bad_token_ids)
    _require(count <= MAX_BAD_WORDS, "bad_words", f"are {count} token sequences, at most {MAX_BAD_WORDS} are followed")
    _check_token_rules(p)
    _check_grammar(p)


def _check_token_rules(p: SamplingParams) -> None:
    banned = {ids[0] for ids in p.bad_token_ids if len(ids) == 1}
    left = not p.allowed_token_ids or not banned.issuperset(p.allowed_token_ids)
    _require(left, "bad_words", "ban every token of allowed_token_ids")


def _check_grammar(p: SamplingParams) -> None:
    given = [kind for kind in GRAMMAR_KINDS if getattr(p, kind) is not None]
    _require(len(given) <= 1, given[-1] if given else "", f"only one of {', '.join(given)} can be followed")
    for kind in given:
        source = getattr(p, kind)
        _require(bool(source.strip()), kind, "must not be empty")
        _require(len(source) <= MAX_GRAMMAR_CHARS, kind, f"must have at most {MAX_GRAMMAR_CHARS} characters")


def _in_range(field: str, value: float, low: float, high: float) -> None:
    _require(low <= value <= high, field, f"must be between {low:g} and {high:g}, got {value:g}")


def _require(ok: bool, field: str, message: str) -> None:
    if not ok:
        raise InvalidParam(field, message)
