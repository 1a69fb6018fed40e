"""Drafts from a request's own text after its newest tokens' last occurrence (prompt lookup).

  ... def area ( self ) : ...  def area ( se       the newest 4 tokens have occurred before:
          ^^^^^^^^^^^^^ lf      ^^^^^^^^^^^^^       the tokens after them are the draft

Indexes are per request: a shared one would leak text by timing. Idea: Saxena's prompt lookup.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.request import Request
from engine.speculative.drafts import NO_DRAFT, Draft, Drafts

SHORTEST_MATCH = 2  # minimum tokens of a match: single ones predict little
LONGEST_MATCH = 32  # maximum compared tokens: the longest match gives the draft
RECENT = 8  # compared places per n-gram
INDEXED_AT_ONCE = 4096  # tokens: 1 us each, in the scheduler's thread


@dataclass(slots=True, eq=False)
class NgramIndex:
    """Ends of n-grams of `least` tokens."""

    least: int
    tokens: list[int] = field(default_factory=list)
    _ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _indexed: int = 0

    def read(self, known: Sequence[int], output: Sequence[int]) -> None:
        if len(self.tokens) < len(known):
            self.tokens += known[len(self.tokens) :]
        self.tokens += output[len(self.tokens) - len(known) :]
        end = min(len(self.tokens), self._indexed + INDEXED_AT_ONCE)
        for at in range(max(self._indexed, self.least), end):  # the n-gram before `at` has a successor
            ends = self._ends.setdefault(tuple(self.tokens[at - self.least : at]), [])
            ends.append(at)
            if len(ends) > RECENT:
                del ends[0]
        self._indexed = end

    def draft(self, *, longest_match: int, most: int) -> Draft:
        """Continue the longest, then latest match, by fewer tokens after a short one."""
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
    """Copy from `start`, repeating a period at the end."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]


class NgramDrafter:
    def __init__(self, *, most: int) -> None:
        self._most = most

    def draft(self, request: Request) -> Draft:
        drafts = request.of(Drafts)
        index = drafts.index = drafts.index or NgramIndex(SHORTEST_MATCH)
        index.read(request.input_ids, request.output_ids)
        return index.draft(longest_match=LONGEST_MATCH, most=self._most)
