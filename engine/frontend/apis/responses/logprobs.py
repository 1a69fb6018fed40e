"""Assigns tokens' logprobs to texts among reasoning and calls. Pure.

A token belongs to the text in which its own text lies or starts.
"""

from collections import deque
from typing import Any

from engine.text.incremental import Span


class TextLogprobs:
    """Logprobs of each text: `feed` text and tokens, `take` its logprobs.

    `only_text`: no other parts.
    """

    def __init__(self, *, only_text: bool) -> None:
        self._only_text = only_text
        self._text = ""
        self._taken = 0  # position up to which texts were taken
        self._waiting: deque[tuple[Span, dict[str, Any]]] = deque()

    def feed(self, text: str, logprobs: list[dict[str, Any]], spans: list[Span]) -> None:
        """`spans`: of tokens in the whole text."""
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
        rest = [logprob for _, logprob in self._waiting]
        self._waiting.clear()
        return rest
