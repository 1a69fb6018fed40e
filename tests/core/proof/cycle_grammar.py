"""A grammar of three lines, in the protocol of engine/core/request.py: which token may stand depends on its place."""

from dataclasses import dataclass, replace

from tests.core.hash_model import MASK_BYTES, VOCAB


@dataclass
class CycleGrammar:
    """At place i the tokens t with (t + i) % 3 != turn may stand; behind `length` tokens nothing may."""

    turn: int
    length: int
    place: int = 0
    problem: str = ""

    @property
    def ended(self) -> bool:
        return self.place >= self.length

    def _allows(self, token: int) -> bool:
        return not self.ended and (token + self.place) % 3 != self.turn

    def accept(self, token: int) -> bool:
        if not self._allows(token):
            self.problem = f"token {token} cannot stand at place {self.place}"
            return False
        self.place += 1
        return True

    def forced(self) -> list[int]:
        return []

    def fork(self) -> "CycleGrammar":
        return replace(self)

    def bitmask(self) -> bytes:
        mask = bytearray(MASK_BYTES)
        for token in range(VOCAB):
            if self._allows(token):
                mask[token // 8] |= 1 << token % 8
        return bytes(mask)
