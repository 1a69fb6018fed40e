"""Rooms of one side and their states. Pure."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Generic, TypeVar

# ---- state of a transfer

RoomKey = tuple[int, int]  # (bootstrap_room, room_attempt)


class KVPoll(IntEnum):
    """State of a transfer: KVPoll and its transitions.

    Names and values are SGLang's (`disaggregation/base/conn.py`); ranks agree on the minimum.

        Bootstrapping --> WaitingForInput --> Transferring --> Success
              |                 |                  |
              +-----------------+------------------+---------> Failed
    """

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


FINAL = frozenset({KVPoll.Failed, KVPoll.Success})

TRANSITIONS: dict[KVPoll, frozenset[KVPoll]] = {
    KVPoll.Bootstrapping: frozenset({KVPoll.WaitingForInput, KVPoll.Failed}),
    KVPoll.WaitingForInput: frozenset({KVPoll.Transferring, KVPoll.Failed}),
    KVPoll.Transferring: frozenset({KVPoll.Success, KVPoll.Failed}),
    KVPoll.Success: frozenset(),
    KVPoll.Failed: frozenset(),
}


class IllegalTransition(Exception):
    """A move that is not in the table. Nothing changed."""


class PeerProtocolError(Exception):
    """A peer sent a message that is not allowed now. Counted and dropped."""


class RoomInUse(ValueError):
    """The room serves another transfer."""


# ---- rooms


@dataclass(eq=False)
class Room:
    """Transfer of either side; `reason` of its failure."""

    key: RoomKey
    _: KW_ONLY
    state: KVPoll = KVPoll.Bootstrapping
    reason: str | None = None
    progress_at_s: float = 0.0

    @property
    def final(self) -> bool:
        return self.state in FINAL


R = TypeVar("R", bound=Room)


class RoomTable(Generic[R]):
    def __init__(self) -> None:
        self.num_moves = 0  # only grows; shows that a visible state changed
        self._rooms: dict[RoomKey, R] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._rooms.values()))

    def __getitem__(self, key: RoomKey) -> R:
        return self._rooms[key]

    def get(self, key: RoomKey) -> R | None:
        return self._rooms.get(key)

    def add(self, room: R) -> None:
        """Raises `RoomInUse`, and ValueError for an invalid number."""
        number, attempt = room.key
        if not 0 < number < 2**63 or attempt < 0:
            raise ValueError(f"bootstrap_room must be between 1 and 2**63-1 and attempt at least 0, got {room.key}")
        if room.key in self._rooms:
            raise RoomInUse(f"bootstrap_room {number} (attempt {attempt}) is in use on this worker")
        self._rooms[room.key] = room
        self.touch()

    def move(self, room: R, to: KVPoll) -> None:
        """Raises `IllegalTransition`."""
        if to not in TRANSITIONS[room.state]:
            raise IllegalTransition(f"room {room.key}: {room.state.name} -> {to.name}")
        room.state = to
        self.touch()

    def touch(self) -> None:
        """Count a visible change."""
        self.num_moves += 1

    def forget(self, room: R) -> None:
        if not room.final:
            raise IllegalTransition(f"room {room.key}: forgotten in {room.state.name}")
        del self._rooms[room.key]
