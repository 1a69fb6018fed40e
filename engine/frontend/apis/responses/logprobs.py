"""Which tokens' logprobs belong to which text of an answer that is also reasoning and calls. Pure.

Parts keep their text, not their tokens: a token belongs to the text in which its own lies, or begins.
"""

from collections import deque
from typing import Any

from engine.text.incremental import Span


class TextLogprobs:
    """The logprobs of one answer: `feed` its text and tokens as they come, `take` those of each text in order. `only_text`: it has no other parts."""

    def __init__(self, *, only_text: bool) -> None:
        self._only_text = only_text
        self._text = ""
        self._taken = 0  # up to where texts were taken
        self._waiting: deque[tuple[Span, dict[str, Any]]] = deque()

    def feed(self, text: str, logprobs: list[dict[str, Any]], spans: list[Span]) -> None:
        """`spans`: of the tokens, in the whole text."""
        self._text += text
        self._waiting.extend(zip(spans, logprobs, strict=False))

    def take(self, text: str) -> list[dict[str, Any]]:
        if self._only_text:
            return self.rest()
        start = max(self._taken, self._text.find(text, self._taken))
        self._taken = start + len(text)
        taken = []
        while self._waiting and self._waiting[0][0][0] < self._taken:
            (begin, end), logprob = self._waiting.popleft()
            if begin >= start or end > start:
                taken.append(logprob)
        return taken

    def rest(self) -> list[dict[str, Any]]:
        """Return the logprobs whose text has not come."""
        rest = [logprob for _, logprob in self._waiting]
        self._waiting.clear()
        return rest
