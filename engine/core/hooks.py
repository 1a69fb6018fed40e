"""Interfaces of a request's grammar and stop search."""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.messages import FinishReason


class Grammar(Protocol):
    """Grammar state of one request, advanced by committed tokens.

    `ended`: only an end token may follow, or did.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    def accept(self, token: int) -> bool:
        """Return False for an invalid token; then the state is unusable."""

    def bitmask(self) -> bytes:
        """Return allowed tokens: bit t % 8 of byte t // 8; 4 * ceil(vocab_size / 32) bytes."""

    def forced(self) -> Sequence[int]:
        """Return tokens that must come next, if known."""

    def fork(self) -> "Grammar":
        """Return an independent copy."""


# Compiled grammar shared by requests: makes an initial state. Cheap.
StartGrammar = Callable[[], Grammar]


class Stops(Protocol):
    """Search for stop strings and regexes (engine/text/stop_search.py)."""

    def look(self, output_ids: Sequence[int]) -> FinishReason | None:
        """Return the stop in the last token's text; reads only new ids."""
