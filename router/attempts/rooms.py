"""Rooms: the numbers under which the two halves of a request meet. Owns the set of live ones, and the random numbers.

A room is never 0 (SGLang's prefill never completes room 0), unpredictable, and never equal to a live one: two live requests
in one room would mix their KV.
"""

import os
from collections.abc import Callable, Iterable

ROOM_BITS = 63
MAX_LIVE_ROOMS = 1 << 20
BLOCK_BYTES = 4096


class RoomMinter:
    """Mints rooms from `draw(bits)`, which returns a random integer in [0, 2**bits)."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self._live: set[int] = set()

    def has_room_for(self, count: int) -> bool:
        return len(self._live) + count <= MAX_LIVE_ROOMS

    def mint(self, count: int) -> tuple[int, ...]:
        """`count` new rooms; they live until released."""
        return tuple([self._mint_one() for _ in range(count)])

    def _mint_one(self) -> int:
        room = 0
        while room == 0 or room in self._live:
            room = self._draw(ROOM_BITS)
        self._live.add(room)
        return room

    def release(self, rooms: Iterable[int]) -> None:
        self._live.difference_update(rooms)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def check(self) -> None:
        assert all(0 < room < 1 << ROOM_BITS for room in self._live)


class Entropy:
    """Unpredictable numbers for rooms and request ids, read from the system in blocks: fewer system calls."""

    def __init__(self) -> None:
        self._block = b""
        self._at = 0

    def bits(self, num_bits: int) -> int:
        """A random integer in [0, 2**num_bits)."""
        num_bytes = (num_bits + 7) // 8
        return int.from_bytes(self._take(num_bytes), "little") >> (8 * num_bytes - num_bits)

    def name(self) -> str:
        return self._take(16).hex()

    def _take(self, num_bytes: int) -> bytes:
        if self._at + num_bytes > len(self._block):
            self._block, self._at = os.urandom(BLOCK_BYTES), 0
        taken = self._block[self._at : self._at + num_bytes]
        self._at += num_bytes
        return taken
