"""A request's grammar, as the scheduler uses it: a pure hook that comes with the request, compiled outside."""

from typing import Protocol


class Grammar(Protocol):
    """The state of one request in its grammar: it advances by one token whenever one is committed on the host.

    `ended`: nothing but an end token may follow, or one has. `problem`: why the last token was not accepted; "" if it was.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    def accept(self, token: int) -> bool:
        """Advance by `token`; False when it cannot stand here (the state is of no use from then on)."""

    def bitmask(self) -> bytes:
        """Tokens that may come next: bit t % 8 of byte t // 8; 4 * ceil(vocab_size / 32) bytes."""
