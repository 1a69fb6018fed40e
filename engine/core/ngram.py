"""Drafts from a request's own text: what followed the last time its newest tokens occurred (prompt lookup, n-gram speculation).

    ... def area ( self ) : ...  def area ( se       the newest 4 tokens have occurred before: the tokens behind them are the draft
            ^^^^^^^^^^^^^ lf      ^^^^^^^^^^^^^

An index belongs to one request: with a shared one, the time of an answer would tell what others have written. Idea: Saxena's
prompt-lookup-decoding, vLLM's and SGLang's NGRAM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.drafts import NO_DRAFT, Draft
from engine.core.request import Request

SHORTEST_MATCH = 2  # tokens that must have occurred before: one alone is seldom followed by the same
LONGEST_MATCH = 32  # tokens that count: of several places the one with the longest match gives the draft
RECENT = 8  # places of an n-gram that are compared
INDEXED_AT_ONCE = 4096  # tokens: 1 us each, in the scheduler's thread


@dataclass(slots=True, eq=False)
class NgramIndex:
    """The ends of n-grams of `least` tokens in the part of `tokens` that has been read."""

    least: int
    tokens: list[int] = field(default_factory=list)
    _ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _indexed: int = 0

    def read(self, known: Sequence[int], output: Sequence[int]) -> None:
        """Take in what is new of a request's prompt and output."""
        if len(self.tokens) < len(known):
            self.tokens += known[len(self.tokens) :]
        self.tokens += output[len(self.tokens) - len(known) :]
        end = min(len(self.tokens), self._indexed + INDEXED_AT_ONCE)
        for at in range(max(self._indexed, self.least), end):  # the n-gram before `at`: a token has followed it
            ends = self._ends.setdefault(tuple(self.tokens[at - self.least : at]), [])
            ends.append(at)
            if len(ends) > RECENT:
                del ends[0]
        self._indexed = end

    def draft(self, *, longest_match: int, most: int) -> Draft:
        """Continue the longest match, of equal ones the latest, by at most `most` tokens; by fewer if the match is short."""
        tokens = self.tokens
        ends = self._ends.get(tuple(tokens[-self.least :]), ())
        best, at = 0, 0
        for end in reversed(ends):
            match = self.least
            while match < longest_match and match < end and tokens[end - match - 1] == tokens[-match - 1]:
                match += 1
            if match > best:
                best, at = match, end
        if not best:
            return NO_DRAFT
        return Draft(_copy(tokens, at, min(most, 2 + best - self.least)), best)


def _copy(tokens: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; behind the last one the text that repeats goes on."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]


class NgramDrafter:
    """`most`: drafted tokens of a request in a step."""

    def __init__(self, *, most: int) -> None:
        self._most = most

    def draft(self, request: Request) -> Draft:
        index = request.drafts.index = request.drafts.index or NgramIndex(SHORTEST_MATCH)
        index.read(request.input_ids, request.output_ids)
        return index.draft(longest_match=LONGEST_MATCH, most=self._most)
