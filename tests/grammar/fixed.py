"""A grammar that notes what it saw, refuses one token, and ends after a number of tokens."""

from copy import deepcopy


class Fixed:
    """Refuses the token `refuses` and ends after `length` tokens."""

    problem = "no such word"

    def __init__(self, length: int, refuses: int = -1) -> None:
        self.seen: list[int] = []
        self.masks = 0
        self._length, self._refuses = length, refuses

    @property
    def ended(self) -> bool:
        return len(self.seen) >= self._length

    def accept(self, token: int) -> bool:
        self.seen.append(token)
        return token != self._refuses

    def forced(self) -> list[int]:
        return []

    def fork(self) -> "Fixed":
        return deepcopy(self)

    def bitmask(self) -> bytes:
        self.masks += 1
        return b"\xff" * 8
