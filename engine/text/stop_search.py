"""The scheduler's search for stop strings and regexes in an answer, token by token. Pure.

It reads the client's own text (`IncrementalText`), so all lengths here are characters of text, never numbers of tokens:

    answer:  ... | context | may belong to a stop | text of the newest token |
    tail:        [ 1       | reach - 1            | any length               ]
"""

from collections.abc import Callable, Iterator, Sequence

from engine.core.hooks import Stops
from engine.messages import FinishReason
from engine.sampling_params import SamplingParams
from engine.text.incremental import IncrementalText, tail_of
from engine.text.stop_regex import compile_all
from engine.text.tokenizer import Tokenizer

MakeStops = Callable[[Sequence[int], SamplingParams], Stops | None]  # from the prompt's ids


def stops_of(tokenizer: Tokenizer, input_ids: Sequence[int], sampling: SamplingParams) -> "StopSearch | None":
    """Make the search for a request; None: it has no stop strings and regexes."""
    return StopSearch(tokenizer, input_ids, sampling) if sampling.stop or sampling.stop_regex else None


def no_stops(input_ids: Sequence[int], sampling: SamplingParams) -> None:
    """`stops_of` for a worker without a tokenizer: its frontend refuses stop strings."""


class StopSearch:
    """A stop may name special tokens, so the text with them is searched; also the text without, once the two differ."""

    def __init__(self, tokenizer: Tokenizer, input_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stop = sampling.stop
        self._regexes = compile_all(sampling.stop_regex)
        self._skips = sampling.skip_special_tokens
        reach = max([*map(len, self._stop), *(regex.reach for regex in self._regexes)])
        text = IncrementalText(tokenizer, prompt_tail=tail_of(input_ids), skip_special_tokens=False)
        self._tails = [_Tail(text, reach)]
        self._num_read = 0

    def look(self, output_ids: Sequence[int]) -> FinishReason | None:
        """Return the stop that ends in the text of the last token, the one that begins first. What was not looked at before is let through."""
        new = output_ids[self._num_read :]
        self._num_read = len(output_ids)
        if self._skips and len(self._tails) == 1 and not self._tokenizer.special_ids.isdisjoint(new):
            self._tails.append(self._tails[0].without_special())
        for tail in self._tails:
            if len(new) > 1:
                tail.let_through(new[:-1])
        grown = [tail for tail in self._tails if tail.push(new[-1:])]
        found = [reason for tail in grown for reason in self._found(tail)]
        return max(found, key=_trim, default=None)

    def _found(self, tail: "_Tail") -> Iterator[FinishReason]:
        """Matches in this text, each the first of its stop."""
        text, first, beyond = tail.text, tail.first, tail.num_let_through
        for stop in self._stop:
            if (at := text.find(stop, max(first, beyond - len(stop) + 1))) >= 0:
                yield FinishReason(kind="stop", matched=stop, trim=self._shown(text[at:]))
        for regex in self._regexes:
            if (begin := regex.begin(text, start=first, beyond=beyond)) is not None:
                yield FinishReason(kind="stop", matched=regex.pattern, trim=self._shown(text[begin:]))

    def _shown(self, rest: str) -> int:
        """Count what the client sees of the answer's end."""
        return len(self._tokenizer.without_special(rest) if len(self._tails) > 1 else rest)


class _Tail:
    """The end of a growing text. `first`: where a match may begin, behind the character that ^ and \\b see.

    `num_let_through`: characters of `text` in which no stop is looked for, unless it ends behind them.
    """

    def __init__(self, source: IncrementalText, reach: int) -> None:
        self._source = source
        self._reach = reach
        self.text = ""
        self.first = 0  # 0: the answer begins here
        self.num_let_through = 0

    def without_special(self) -> "_Tail":
        """Return the tail of the same text, which goes on without special tokens."""
        tail = _Tail(self._source.without_special(), self._reach)
        tail.text, tail.first, tail.num_let_through = self.text, self.first, self.num_let_through
        return tail

    def let_through(self, ids: Sequence[int]) -> None:
        if self.push(ids):
            self.num_let_through = len(self.text)

    def push(self, ids: Sequence[int]) -> bool:
        """Add ids; return whether the text grew."""
        new = self._source.push(ids)
        if not new:
            return False
        if (num_gone := len(self.text) - self._reach) > 0:
            self.text, self.first = self.text[num_gone:], 1
            self.num_let_through = max(0, self.num_let_through - num_gone)
        self.text += new
        return True


def _trim(reason: FinishReason) -> int:
    return reason.trim
