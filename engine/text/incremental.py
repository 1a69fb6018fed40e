"""Token ids to text, a few at a time. The scheduler decides where a request ends. Pure.

`IncrementalText` turns ids into final characters, `StopScanner` follows how much may still become a stop string, and
`RequestText` holds that back and trims what ended the request.

    window:  [ context ... | new ids ...          ]      decoded as one: correct spacing and split characters
    text:    [ already given out | final | broken ]      `broken`: the beginning of a character, held back
"""

from collections.abc import Sequence

from engine.messages import FinishReason
from engine.text.stop_regex import StopRegex
from engine.text.tokenizer import BROKEN, Tokenizer

WINDOW = 24  # tokens decoded at most before the window is cut ...
CONTEXT = 6  # ... down to these, which only give the rest its context
WINDOW_MAX = 64  # cut here even without a clean place


class IncrementalText:
    """Characters of a growing list of ids; gives out each one once, when it is complete.

    `prompt_tail`: the last ids of the prompt, which decide about the space before the first word; only those after the
    last special token (a role marker) count.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt_tail: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = _after_last(tokenizer.special_ids, prompt_tail)
        self._inside = False  # the window ends inside a character
        self._given = len(self._final_text())

    def push(self, ids: list[int]) -> str:
        """Add ids; return the characters that are newly complete."""
        self._window += [i for i in ids if not (self._skip_special and i in self._tokenizer.special_ids)]
        text = self._final_text()
        new = text[self._given :]
        self._given = max(self._given, len(text))
        if len(self._window) > WINDOW:
            self._cut()
        return new

    def _final_text(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special)
        self._inside = text.endswith(BROKEN) and self._tokenizer.ends_inside_character(
            self._window, skip_special_tokens=self._skip_special
        )
        if not self._inside:
            return text
        return text[:-1] if self._tokenizer.byte_level else text.rstrip(BROKEN)

    def _cut(self) -> None:
        """Forget old tokens. The cut must leave visible context and spare characters."""
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
            return True  # bytes just join: later text does not depend on earlier text
        text = self._tokenizer.decode(self._window[first:], skip_special_tokens=self._skip_special)
        return bool(text) and not text.startswith(BROKEN)


class StopScanner:
    """Follows stop strings through a text, one Knuth-Morris-Pratt automaton each: constant work per character.

    `held`: length of the longest end of the text that is a beginning of a stop string (or all of one).
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
    """The text of one request for its client. `no_stop_trim`: it includes what ended it.

    Where special tokens are skipped, only the rest of a stop string that names one appears and is trimmed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_tail: list[int],
        stop: tuple[str, ...],
        skip_special_tokens: bool,
        stop_regex: tuple[str, ...] = (),
        no_stop_trim: bool = False,
    ) -> None:
        self._text = IncrementalText(tokenizer, prompt_tail=prompt_tail, skip_special_tokens=skip_special_tokens)
        self._trims = not no_stop_trim
        self._seen_of = tokenizer.without_special if skip_special_tokens else str
        self._scanner = StopScanner(tuple(map(self._seen_of, stop)) if self._trims else ())
        self._regexes = {pattern: StopRegex(pattern) for pattern in (stop_regex if self._trims else ())}
        self._may_hold = bool(self._scanner.num_patterns or self._regexes)
        self._reach = max((regex.reach - 1 for regex in self._regexes.values()), default=0)
        self._before = ""  # the last character given out: what ^ and \b see before the held text
        self._held = ""

    def push(self, ids: list[int], finish: FinishReason | None = None) -> str:
        """Text that is final now; with `finish` all, without what ended it and without a last incomplete character."""
        if finish is None and not self._may_hold:
            return self._text.push(ids)
        before = len(self._held)
        new = self._text.push(_without_stop_token(ids, finish) if self._trims else ids)
        text = self._held + new
        if finish is not None:
            self._held = ""
            return self._trimmed(text, finish, before) if self._trims else text
        self._scanner.push(new)
        end = len(text) - min(max(self._scanner.held, self._reach), len(text))
        self._held = text[end:]
        self._before = text[end - 1] if end else self._before
        return text[:end]

    def _trimmed(self, text: str, finish: FinishReason, before: int) -> str:
        if not finish.regex:
            seen = self._seen_of(str(finish.matched))
            return _trimmed(text, finish, before) if seen == finish.matched else text.removesuffix(seen)
        regex, start = self._regexes[str(finish.matched)], len(self._before)
        at = regex.begin(self._before + text, start=start, beyond=start + before)
        return text if at is None else text[: at - start]


def tail_texts(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> tuple[str, ...]:
    """Texts of the last output ids for the scheduler's stop check, without a last incomplete character.

    With special tokens, since a stop string may name one; also without, if that differs and the client sees it.
    """
    skips = (False, True) if skip_special_tokens and not tokenizer.special_ids.isdisjoint(ids) else (False,)
    return tuple(IncrementalText(tokenizer, prompt_tail=[], skip_special_tokens=skip).push(list(ids)) for skip in skips)


def no_texts(ids: Sequence[int], skip_special_tokens: bool) -> tuple[str, ...]:
    """`tail_texts` of a worker without a tokenizer: its frontend refuses stop strings."""
    return ()


def _without_stop_token(ids: list[int], finish: FinishReason | None) -> list[int]:
    if finish is not None and finish.kind == "stop" and ids and finish.matched == ids[-1]:
        return ids[:-1]
    return ids


def _trimmed(text: str, finish: FinishReason, before: int) -> str:
    stop = finish.matched
    if finish.kind != "stop" or not isinstance(stop, str) or not stop:
        return text
    at = text.find(stop, max(0, before - len(stop) + 1))  # one that ends in the new text, if there is one
    at = at if at >= 0 else text.find(stop)
    return text[:at] if at >= 0 else text


def _after_last(special: frozenset[int], ids: list[int]) -> list[int]:
    last = max((i for i, t in enumerate(ids) if t in special), default=-1)
    return ids[last + 1 :]


def _failure_table(pattern: str) -> list[int]:
    """table[k]: length of the longest proper border of pattern[:k]. Knuth, Morris, Pratt 1977."""
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
