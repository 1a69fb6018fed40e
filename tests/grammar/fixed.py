"""The grammar of tests: a rule says which token may stand at a place, and after a number of tokens it ends."""

from collections.abc import Callable, Sequence
from copy import copy

from tests.core.hash_model import VOCAB

Rule = Callable[[Sequence[int], int], bool]  # tokens before it, and a token


class Fixed:
    """Notes what it saw. `allows`: by default any token. `refuses`: one that its masks allow."""

    def __init__(
        self,
        length: int,
        allows: Rule = lambda before, token: True,
        *,
        refuses: int | None = None,
        vocab_size: int = VOCAB,
    ) -> None:
        self.seen: list[int] = []
        self.masks = 0
        self.problem = ""
        self._length, self._allows, self._refuses, self._vocab_size = length, allows, refuses, vocab_size

    @property
    def ended(self) -> bool:
        return len(self.seen) >= self._length

    def accept(self, token: int) -> bool:
        allowed = token != self._refuses and self._allows(self.seen, token)
        if not allowed:
            self.problem = f"token {token} cannot stand at place {len(self.seen)}"
        self.seen.append(token)
        return allowed

    def forced(self) -> list[int]:
        return []

    def fork(self) -> "Fixed":
        other = copy(self)
        other.seen = list(self.seen)
        return other

    def bitmask(self) -> bytes:
        self.masks += 1
        bits = sum(1 << token for token in range(self._vocab_size) if self._allows(self.seen, token))
        return bits.to_bytes(4 * -(-self._vocab_size // 32), "little")


def cycle(turn: int, length: int) -> Fixed:
    """At place i the tokens t with (t + i) % 3 != turn may stand; behind `length` tokens nothing may."""
    return Fixed(length, lambda before, token: len(before) < length and (token + len(before)) % 3 != turn)
