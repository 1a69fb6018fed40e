"""Incremental detokenization. The scheduler decides where a request ends.

`IncrementalText` turns ids into final characters, `StopScanner` tracks possible stop strings,
`RequestText` holds those back and trims the stop.

window:  [ context ... | new ids ...          ]      decoded together: correct spaces and characters
text:    [ already given out | final | broken ]      broken: an incomplete character
"""

from collections.abc import Sequence
from copy import copy

from engine.messages import FinishReason
from engine.text.stop_regex import reach_of
from engine.text.tokenizer import BROKEN, Tokenizer

Span = tuple[int, int]  # start and end in a text, in characters

WINDOW = 24  # maximum tokens to decode, then the window is cut ...
CONTEXT = 6  # ... to these, as context
WINDOW_MAX = 64  # cut here even within a character
PROMPT_TAIL_TOKENS = 8  # context from the prompt


class IncrementalText:
    """Text of growing ids; gives out each character once, when complete.

    `prompt_tail`: last prompt ids, for the first space or a split character; only those after the
    last special token count. `num_chars`: given out.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = _from_whole_character(tokenizer, _after_last(tokenizer.special_ids, prompt_tail))
        self._inside = False  # the window ends inside a character
        self._given = len(self._final_text()) if self._window else 0
        self.num_chars = 0

    def fork(self) -> "IncrementalText":
        forked = copy(self)
        forked._window = list(self._window)
        return forked

    def without_special(self) -> "IncrementalText":
        """Return a fork that skips special tokens; it must not have read any."""
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
    def num_patterns(self) -> int:
        return len(self._patterns)

    @property
    def held(self) -> int:
        return max(self._states, default=0)

    def push(self, text: str) -> None:
        for i, (pattern, failure) in enumerate(self._patterns):
            self._states[i] = _advance(pattern, failure, state=self._states[i], text=text)


class RequestText:
    """Text of one request for its client. `no_stop_trim`: keep the stop.

    With skipped special tokens, a stop string is trimmed as far as it shows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_tail: Sequence[int],
        stop: tuple[str, ...],
        skip_special_tokens: bool,
        stop_regex: tuple[str, ...] = (),
        no_stop_trim: bool = False,
    ) -> None:
        self._text = IncrementalText(tokenizer, prompt_tail=prompt_tail, skip_special_tokens=skip_special_tokens)
        self._trims = not no_stop_trim
        self._seen_of = tokenizer.without_special if skip_special_tokens else str
        self._scanner = StopScanner(tuple(map(self._seen_of, stop)) if self._trims else ())
        self._reach = max((reach_of(pattern) - 1 for pattern in stop_regex), default=0) if self._trims else 0
        self._may_hold = bool(self._scanner.num_patterns or self._reach)
        self._held = ""

    def push(self, ids: list[int], finish: FinishReason | None = None) -> str:
        """Return new final text; with `finish` the rest, without the stop."""
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


def places_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[Span]:
    """An absent token (BOS) has no width."""
    pieces, at, spans = IncrementalText(tokenizer, prompt_tail=[], skip_special_tokens=False), 0, []
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


def _from_whole_character(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
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
