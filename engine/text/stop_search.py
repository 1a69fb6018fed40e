"""The scheduler's search for stop strings and regexes, token by token.

Lengths are characters of the client's text (`IncrementalText`):

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

MakeStops = Callable[[Sequence[int], SamplingParams], Stops | None]  # from prompt ids


def stops_of(tokenizer: Tokenizer, input_ids: Sequence[int], sampling: SamplingParams) -> "StopSearch | None":
    return StopSearch(tokenizer, input_ids, sampling) if sampling.stop or sampling.stop_regex else None


def no_stops(input_ids: Sequence[int], sampling: SamplingParams) -> None:
    """The frontend rejects stops without tokenizer."""


class StopSearch:
    """Searches texts with special tokens (stops may name them) and without."""

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
        """Return the first stop that ends in the last token's text.

        Earlier unseen tokens are not searched.
        """
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


def _trim(reason: FinishReason) -> int:
    return reason.trim
