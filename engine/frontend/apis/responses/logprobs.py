"""Which tokens' logprobs belong to which text of an answer that is also reasoning and calls. Pure.

Parts keep their text, not their tokens: a token belongs to the text that lies where the token's own begins.
"""

from collections import deque
from typing import Any


class TextLogprobs:
    """The logprobs of one answer: `feed` its text and tokens as they come, `take` those of each text in order. `only_text`: it has no other parts."""

    def __init__(self, *, only_text: bool) -> None:
        self._only_text = only_text
        self._text = ""
        self._begun = 0  # where in the text the next token begins
        self._taken = 0  # up to where texts were taken
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()

    def feed(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        self._text += text
        for logprob in logprobs:
            self._waiting.append((self._begun, logprob))
            self._begun += len(logprob["token"])

    def take(self, text: str) -> list[dict[str, Any]]:
        if self._only_text:
            return self.rest()
        start = max(self._taken, self._text.find(text, self._taken))
        self._taken = start + len(text)
        taken = []
        while self._waiting and self._waiting[0][0] < self._taken:
            begins, logprob = self._waiting.popleft()
            if begins + len(logprob["token"]) > start or not logprob["token"]:
                taken.append(logprob)
        return taken

    def rest(self) -> list[dict[str, Any]]:
        """Return the logprobs whose text has not come."""
        rest = [logprob for _, logprob in self._waiting]
        self._waiting.clear()
        return rest
