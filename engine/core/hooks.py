"""What a request brings along, compiled outside: its grammar and its stop patterns, as the scheduler uses them."""

from collections.abc import Sequence
from typing import Protocol


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


class StopPattern(Protocol):
    """A stop regex (engine/text/stop_regex.py). `reach`: longest match, in characters; longer ones may be missed."""

    pattern: str
    reach: int

    def found(self, text: str, start: int) -> bool:
        """Whether a match begins at `start` or later; text before it is context."""
