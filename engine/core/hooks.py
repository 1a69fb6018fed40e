"""What a request brings along, made outside: its grammar and the search for its stops, as the scheduler uses them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.messages import FinishReason


class Grammar(Protocol):
    """The state of one request in its grammar; it advances with every token committed on the host.

    `ended`: only an end token may follow, or one has. `problem`: why the last token was refused, or "".
    """

    @property
    def ended(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    def accept(self, token: int) -> bool:
        """Advance by `token`; False where it cannot stand here, after which the state is of no use."""

    def bitmask(self) -> bytes:
        """Return the tokens that may come next: bit t % 8 of byte t // 8; 4 * ceil(vocab_size / 32) bytes."""

    def forced(self) -> Sequence[int]:
        """Return tokens that must come next, if any are known."""

    def fork(self) -> "Grammar":
        """Return a copy that advances by itself."""


# A compiled grammar, which all its requests share: makes a new state before the first token. Cheap.
StartGrammar = Callable[[], Grammar]


class Stops(Protocol):
    """The search for a request's stop strings and regexes in its text (engine/text/stop_search.py)."""

    def look(self, output_ids: Sequence[int]) -> FinishReason | None:
        """Return the stop that ends in the text of the last token. `output_ids`: all so far; those since the last call are read."""
