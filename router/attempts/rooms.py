"""Rooms: the numbers under which the two halves of a request meet. Owns the set of live ones.

A room is never 0 (SGLang's prefill never completes room 0), unpredictable, and never equal to a live one: two live requests
in one room would mix their KV.
"""

import secrets
from collections.abc import Callable, Iterable

ROOM_BITS = 63
MAX_LIVE_ROOMS = 1 << 20


class RoomMinter:
    """Mints rooms from `draw(bits)`, which returns an unpredictable integer in [0, 2**bits)."""

    def __init__(self, draw: Callable[[int], int] = secrets.randbits) -> None:
        self._draw = draw
        self._live: set[int] = set()

    def has_room_for(self, count: int) -> bool:
        return len(self._live) + count <= MAX_LIVE_ROOMS

    def mint(self, count: int) -> tuple[int, ...]:
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
