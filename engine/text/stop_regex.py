"""Stop regexes: checked on arrival, searched by the scheduler.

RE2 (https://github.com/google/re2) needs linear time and bounded memory, so no pattern can stall a
scheduler; it has no backreferences and lookaround. Python's parser computes the maximum match
length.
"""

import re
import warnings
from re import _parser  # type: ignore[attr-defined]  # private, but the only one that computes a pattern's width (3.11+)

import re2  # type: ignore[import-untyped]

from engine.sampling_params import InvalidParam

MAX_REACH = 256  # characters of a match; longer ones may be missed, because sent text cannot be taken back
MAX_INSTRUCTIONS = 1000  # of all patterns of a request: at most 1 or 2 ms per token, mostly microseconds
MAX_MEMORY_BYTES = 1 << 20
FIELD = "stop_regex"


class StopRegex:
    """A stop regex. `reach`: maximum match in characters; a stream holds back one less."""

    def __init__(self, pattern: str) -> None:
        """Raises InvalidParam."""
        self.pattern = pattern
        self.reach = reach_of(pattern)
        self._compiled = _compiled(pattern)
        if self._compiled.search("") is not None:
            raise InvalidParam(FIELD, f"{_shown(pattern)} matches the empty text: every answer would end at once")

    @property
    def size(self) -> int:
        """Maximum steps per character."""
        return int(self._compiled.programsize)

    def begin(self, text: str, *, start: int, beyond: int) -> int | None:
        """Start of the first match from `start` on that ends after `beyond`.

        Earlier text is context for ^ and \\b.
        """
        return next((match.start() for match in self._compiled.finditer(text, start) if match.end() > beyond), None)


def compile_all(patterns: tuple[str, ...]) -> tuple[StopRegex, ...]:
    """Raises InvalidParam."""
    regexes = tuple(StopRegex(pattern) for pattern in patterns)
    size = sum(regex.size for regex in regexes)
    if size > MAX_INSTRUCTIONS:
        raise InvalidParam(FIELD, f"too large: {size} RE2 instructions, at most {MAX_INSTRUCTIONS}; repeat fewer times")
    return regexes


def _compiled(pattern: str) -> "re2._Regexp":
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_MEMORY_BYTES
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if isinstance(error, re2.error) else "it is not valid Unicode"
        raise _invalid(pattern, reason.decode(errors="replace") if isinstance(reason, bytes) else reason) from None


def reach_of(pattern: str) -> int:
    """Maximum match length by Python's parser, which may differ from RE2."""
    if "{," in pattern:
        raise _invalid(pattern, "write {0,n} instead of {,n}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            width = int(_parser.parse(pattern).getwidth()[1])
    except (re.error, RecursionError, OverflowError) as error:
        raise _invalid(pattern, "nested too deeply" if isinstance(error, RecursionError) else str(error)) from None
    return max(1, min(width, MAX_REACH))


def _invalid(pattern: str, reason: str) -> InvalidParam:
    return InvalidParam(
        FIELD, f"{_shown(pattern)} is no regular expression that can be followed (RE2 syntax): {reason}"
    )


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")
