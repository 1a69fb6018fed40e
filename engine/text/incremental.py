"""Incremental detokenization. The scheduler decides where a request ends.


window:  [ context ... | new ids ...          ]      decoded together: correct spaces and characters
text:    [ already given out | final | broken ]      broken: an incomplete character
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from re import _parser  # type: ignore[attr-defined]  # private, but the only one that computes a pattern's width (3.11+)
from typing import TYPE_CHECKING

import re2  # type: ignore[import-untyped]

from engine.core.request import Stops
from engine.messages import FinishReason, GenerateRequest, TokenLogprob, TokenOutput
from engine.sampling_params import InvalidParam, TextParams
from engine.text.sample import Span, TextOutput
from service.telemetry.context import about

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer  # needs an extra

log = logging.getLogger(__name__)

MAX_REACH = 256  # characters of a match; longer ones may be missed, because sent text cannot be taken back
MAX_INSTRUCTIONS = 1000  # of all patterns of a request: at most 1 or 2 ms per token, mostly microseconds
MAX_MEMORY_BYTES = 1 << 20
FIELD = "stop_regex"


class StopRegex:
    """`reach`: maximum match in characters; a stream holds back one less.

    RE2 (https://github.com/google/re2) needs linear time and bounded memory; it has no
    backreferences and lookaround. Python's parser computes `reach`.
    """

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


BROKEN = "�"  # a decoder's output for invalid UTF-8

WINDOW = 24  # maximum tokens to decode, then the window is cut ...
CONTEXT = 6  # ... to these, as context
WINDOW_MAX = 64  # cut here even within a character
PROMPT_TAIL_TOKENS = 8  # context from the prompt


class IncrementalText:
    """Text of growing ids; gives out each character once, when complete.

    `prompt_remainder`: last prompt ids, for the first space or a split character; only those after
    the last special token count. `num_chars`: given out.
    """

    def __init__(self, tokenizer: "Tokenizer", *, prompt_remainder: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = _from_whole_character(tokenizer, _after_last(tokenizer.special_ids, prompt_remainder))
        self._inside = False  # the window ends inside a character
        self._given = len(self._final_text()) if self._window else 0
        self.num_chars = 0

    def fork(self) -> "IncrementalText":
        forked = copy(self)
        forked._window = list(self._window)
        return forked

    def without_special(self) -> "IncrementalText":
        """A fork that skips special tokens; it must not have read any."""
        forked = self.fork()
        forked._skip_special = True
        return forked

    def push(self, ids: Sequence[int]) -> str:
        self._window += [i for i in ids if not (self._skip_special and i in self._tokenizer.special_ids)]
        text = self._final_text()
        new = text[self._given :]
        self._given = max(self._given, len(text))
        self.num_chars += len(new)
        if len(self._window) > WINDOW:
            self._cut()
        return new

    def _final_text(self) -> str:
        text, num_open = self._decoded(self._window), 0
        if text.endswith(BROKEN):
            num_open = self._tokenizer.num_open_bytes(self._window, skip_special_tokens=self._skip_special)
        self._inside = num_open > 0
        if num_open and self._tokenizer.byte_level:
            return text[:-1]
        return self._decoded(self._window[:-num_open]) if num_open else text  # incomplete bytes spoil those before them

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _cut(self) -> None:
        """The cut must leave visible context and no split character."""
        if self._inside and len(self._window) <= WINDOW_MAX:
            return
        first = len(self._window) - CONTEXT
        while first > 0 and not self._clean(first):
            first -= 1
        if first > 0 or len(self._window) > WINDOW_MAX:
            self._window = self._window[first or -CONTEXT :]
            self._given = len(self._final_text())

    def _clean(self, first: int) -> bool:
        if self._tokenizer.byte_level:
            return True  # bytes join without effect on one another
        text = self._decoded(self._window[first:])
        return bool(text) and not text.startswith(BROKEN)


class StopScanner:
    """Tracks stop strings by Knuth-Morris-Pratt automata: constant work per character.

    `held`: length of the longest suffix that starts a stop string.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._patterns = [(s, _failure_table(s)) for s in stop if s]
        self._states = [0] * len(self._patterns)

    @property
    def held(self) -> int:
        return max(self._states, default=0)

    def push(self, text: str) -> None:
        for i, (pattern, failure) in enumerate(self._patterns):
            self._states[i] = _advance(pattern, failure, state=self._states[i], text=text)


class RequestText:
    """With skipped special tokens, a stop string is trimmed as far as it shows."""

    def __init__(self, tokenizer: "Tokenizer", params: TextParams, *, prompt_remainder: Sequence[int]) -> None:
        skips, self._trims = params.skip_special_tokens, not params.no_stop_trim
        self._text = IncrementalText(tokenizer, prompt_remainder=prompt_remainder, skip_special_tokens=skips)
        self._seen_of = tokenizer.without_special if skips else str
        stops = tuple(map(self._seen_of, params.stop)) if self._trims else ()
        self._scanner = StopScanner(stops)
        self._reach = max((reach_of(pattern) - 1 for pattern in params.stop_regex), default=0) if self._trims else 0
        self._may_hold = any(stops) or self._reach > 0
        self._held = ""

    def push(self, ids: list[int], finish: FinishReason | None = None) -> str:
        """New final text; with `finish` the rest, without the stop."""
        if finish is None and not self._may_hold:
            return self._text.push(ids)
        new = self._text.push(_without_stop_token(ids, finish) if self._trims else ids)
        text = self._held + new
        if finish is not None:
            self._held = ""
            return text[: max(0, len(text) - finish.trim)] if self._trims else text
        self._scanner.push(new)
        end = len(text) - min(max(self._scanner.held, self._reach), len(text))
        self._held = text[end:]
        return text[:end]

    def push_each(self, ids: list[int], finish: FinishReason | None = None) -> tuple[str, list[Span]]:
        """`push`, and each id's span in the text, held back or trimmed parts included."""
        if not ids:
            return self.push(ids, finish), []
        text, spans = "", []
        for left, token in enumerate(ids, 1 - len(ids)):
            begin = self._text.num_chars
            text += self.push([token], None if left else finish)
            spans.append((begin, self._text.num_chars))
        return text, spans


def places_of(tokenizer: "Tokenizer", ids: Sequence[int], text: str) -> list[Span]:
    """An absent token (BOS) has no width."""
    pieces, at, spans = IncrementalText(tokenizer, prompt_remainder=[], skip_special_tokens=False), 0, []
    for token in ids:
        piece = pieces.push([token])
        if not text.startswith(piece, at):
            unspaced = piece.removeprefix(" ")  # after a BOS that has no text
            known = text.startswith(unspaced, at) or token not in tokenizer.special_ids
            piece = unspaced if known else ""
        spans.append((at, min(at + len(piece), len(text))))
        at = spans[-1][1]
    return spans


def tail_of(input_ids: Sequence[int]) -> Sequence[int]:
    """Prompt ids for `IncrementalText`, the same for scheduler and client."""
    return input_ids[-PROMPT_TAIL_TOKENS:]


def _without_stop_token(ids: list[int], finish: FinishReason | None) -> list[int]:
    if finish is not None and finish.kind == "stop" and ids and finish.matched == ids[-1]:
        return ids[:-1]
    return ids


def _after_last(special: frozenset[int], ids: Sequence[int]) -> list[int]:
    last = max((i for i, t in enumerate(ids) if t in special), default=-1)
    return list(ids[last + 1 :])


def _from_whole_character(tokenizer: "Tokenizer", ids: list[int]) -> list[int]:
    """Drop a split character's rest: SentencePiece breaks all bytes after it."""
    rest = (i for i, token in enumerate(ids) if not 0x80 <= (tokenizer.token_bytes(token) or b"-")[0] < 0xC0)
    return ids[next(rest, len(ids)) :]


def _failure_table(pattern: str) -> list[int]:
    """table[k]: longest proper border of pattern[:k] (Knuth, Morris, Pratt 1977)."""
    table = [0] * (len(pattern) + 1)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[i] != pattern[k]:
            k = table[k]
        k += pattern[i] == pattern[k]
        table[i + 1] = k
    return table


def _advance(pattern: str, failure: list[int], *, state: int, text: str) -> int:
    for c in text:
        while state and (state == len(pattern) or pattern[state] != c):
            state = failure[state]
        state += pattern[state] == c
    return state


MakeStops = Callable[[Sequence[int], TextParams], Stops | None]  # from prompt ids


def stops_of(tokenizer: "Tokenizer", input_ids: Sequence[int], sampling: TextParams) -> "StopSearch | None":
    return StopSearch(tokenizer, input_ids, sampling) if sampling.stop or sampling.stop_regex else None


def no_stops(input_ids: Sequence[int], sampling: TextParams) -> None:
    """The frontend rejects stops without tokenizer."""


class StopSearch:
    """Searches texts with special tokens (stops may name them) and without.

    Lengths are characters of the client's text (`IncrementalText`):

    answer:  ... | context | may belong to a stop | text of the newest token |
    tail:        [ 1       | reach - 1            | any length               ]
    """

    def __init__(self, tokenizer: "Tokenizer", input_ids: Sequence[int], sampling: TextParams) -> None:
        self._tokenizer = tokenizer
        self._stop = sampling.stop
        self._regexes = compile_all(sampling.stop_regex)
        self._skips = sampling.skip_special_tokens
        reach = max([*map(len, self._stop), *(regex.reach for regex in self._regexes)])
        text = IncrementalText(tokenizer, prompt_remainder=tail_of(input_ids), skip_special_tokens=False)
        self._tails = [_Tail(text, reach)]
        self._num_read = 0

    def look(self, output_ids: Sequence[int]) -> FinishReason | None:
        """The first stop that ends in the last token's text; others are not searched."""
        new = output_ids[self._num_read :]
        self._num_read = len(output_ids)
        if self._skips and len(self._tails) == 1 and not self._tokenizer.special_ids.isdisjoint(new):
            self._tails.append(self._tails[0].without_special())
        for tail in self._tails:
            if len(new) > 1:
                tail.let_through(new[:-1])
        grown = [tail for tail in self._tails if tail.push(new[-1:])]
        found = [reason for tail in grown for reason in self._found(tail)]
        return max(found, key=lambda reason: reason.trim, default=None)

    def _found(self, tail: "_Tail") -> Iterator[FinishReason]:
        text, first, beyond = tail.text, tail.first, tail.num_let_through
        for stop in self._stop:
            if (at := text.find(stop, max(first, beyond - len(stop) + 1))) >= 0:
                yield FinishReason(kind="stop", matched=stop, trim=self._shown(text[at:]))
        for regex in self._regexes:
            if (begin := regex.begin(text, start=first, beyond=beyond)) is not None:
                yield FinishReason(kind="stop", matched=regex.pattern, trim=self._shown(text[begin:]))

    def _shown(self, rest: str) -> int:
        return len(self._tokenizer.without_special(rest) if len(self._tails) > 1 else rest)


class _Tail:
    """The end of a growing text. `first`: minimum start of a match, after context for ^ and \\b.

    `num_let_through`: a match must end after these characters.
    """

    def __init__(self, source: IncrementalText, reach: int) -> None:
        self._source = source
        self._reach = reach
        self.text = ""
        self.first = 0  # 0: start of the answer
        self.num_let_through = 0

    def without_special(self) -> "_Tail":
        tail = _Tail(self._source.without_special(), self._reach)
        tail.text, tail.first, tail.num_let_through = self.text, self.first, self.num_let_through
        return tail

    def let_through(self, ids: Sequence[int]) -> None:
        if self.push(ids):
            self.num_let_through = len(self.text)

    def push(self, ids: Sequence[int]) -> bool:
        new = self._source.push(ids)
        if not new:
            return False
        if (num_gone := len(self.text) - self._reach) > 0:
            self.text, self.first = self.text[num_gone:], 1
            self.num_let_through = max(0, self.num_let_through - num_gone)
        self.text += new
        return True


# ---- text of one sample; it is made in the frontend: a process of its own costs more (docs/reports/benchmarks.md)


class SampleText:
    def __init__(self, tokenizer: "Tokenizer", request: GenerateRequest) -> None:
        self._token_text = tokenizer.token_text
        skips, tail = request.sampling.skip_special_tokens, tail_of(request.input_ids)
        self._opening: IncrementalText | None = None  # until the first token, which may lose its leading space
        if request.logprobs is not None and not tokenizer.byte_level:
            self._opening = IncrementalText(tokenizer, prompt_remainder=tail, skip_special_tokens=skips)
        self._text = RequestText(tokenizer, request.sampling, prompt_remainder=tail)

    def read(self, output: TokenOutput) -> TextOutput:
        text, spans = self._push(output)
        return TextOutput(
            text=text,
            tokens=output,
            logprob_texts=self._output_texts(output.logprobs),
            logprob_spans=spans,
            input_logprob_texts=[_texts(lp, self._token_text) for lp in output.input_logprobs],
        )

    def _push(self, output: TokenOutput) -> tuple[str, list[Span]]:
        finish = output.finish if output.ends else None
        try:
            if output.logprobs:
                return self._text.push_each(output.new_ids, finish)
            return self._text.push(output.new_ids, finish), []
        except (OverflowError, ValueError) as e:  # an invalid id must fail only this sample
            rid = output.rid
            log.error("request %s: cannot decode %s: %s", rid, output.new_ids[:8], e, extra=about(rid=rid))
            return "", []

    def _output_texts(self, logprobs: list[TokenLogprob]) -> list[tuple[str, list[str]]]:
        texts = [_texts(lp, self._token_text) for lp in logprobs]
        if texts and self._opening is not None:
            texts[0] = _texts(logprobs[0], self._first_text)
            self._opening = None
        return texts

    def _first_text(self, token_id: int) -> str:
        text = self._token_text(token_id)
        if self._opening is None or not text.startswith(" "):
            return text
        return text[1:] if self._opening.fork().push([token_id]) == text[1:] else text


class SampleIds:
    """A sample without tokenizer: texts are empty."""

    def read(self, output: TokenOutput) -> TextOutput:
        return TextOutput(
            text="",
            tokens=output,
            logprob_texts=list(map(_no_texts, output.logprobs)),
            input_logprob_texts=list(map(_no_texts, output.input_logprobs)),
        )


def _texts(lp: TokenLogprob, text: Callable[[int], str]) -> tuple[str, list[str]]:
    return text(lp.token_id), [text(token_id) for _, token_id in [*lp.top, *lp.requested]]


def _no_texts(lp: TokenLogprob) -> tuple[str, list[str]]:
    return "", [""] * (len(lp.top) + len(lp.requested))


def open_text(tokenizer: "Tokenizer | None") -> Callable[[GenerateRequest], SampleText | SampleIds]:
    return (lambda request: SampleIds()) if tokenizer is None else partial(SampleText, tokenizer)
