"""The state of a transfer: KVPoll values, the table of legal moves, and the machine that owns all states of a side. Pure.

Names and values are SGLang's (`disaggregation/base/conn.py`). They are ordered, so that several ranks can agree by MIN.

    Bootstrapping --> WaitingForInput --> Transferring --> Success
          |                 |                  |
          +-----------------+------------------+---------> Failed
"""

from collections.abc import Iterator
from enum import IntEnum

RoomKey = tuple[int, int]  # (bootstrap_room, room_attempt)


class KVPoll(IntEnum):
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
    """Our own code made a move that the table does not have. Nothing changed."""


class PeerProtocolError(Exception):
    """A peer sent what it may not send now. Counted and dropped; nothing changed."""


class RoomInUse(ValueError):
    """The room is live on this side. A room serves one transfer at a time."""


class TransferMachine:
    """Owns the state of every live transfer of one side, by (room, room_attempt)."""

    def __init__(self) -> None:
        self._states: dict[RoomKey, KVPoll] = {}
        self.num_moves = 0  # only grows; shows that a visible state has changed

    def open(self, key: RoomKey) -> None:
        room, room_attempt = key
        if not 0 < room < 2**63 or room_attempt < 0:
            raise ValueError(f"bootstrap_room must be between 1 and 2**63-1 and attempt at least 0, got {key}")
        if key in self._states:
            raise RoomInUse(f"bootstrap_room {room} (attempt {room_attempt}) is in use on this worker")
        self._states[key] = KVPoll.Bootstrapping
        self.num_moves += 1

    def state(self, key: RoomKey) -> KVPoll:
        return self._states[key]

    def move(self, key: RoomKey, to: KVPoll) -> None:
        """Raises `IllegalTransition` for a move that the table does not have."""
        now = self._states[key]
        if to not in TRANSITIONS[now]:
            raise IllegalTransition(f"room {key}: {now.name} -> {to.name}")
        self._states[key] = to
        self.num_moves += 1

    def move_by_peer(self, key: RoomKey, to: KVPoll) -> None:
        """Move on a peer's message. Raises `PeerProtocolError` for an unknown room or an illegal move."""
        now = self._states.get(key)
        if now is None:
            raise PeerProtocolError(f"room {key} is not open")
        if to not in TRANSITIONS[now]:
            raise PeerProtocolError(f"room {key}: {now.name} -> {to.name}")
        self.move(key, to)

    def touch(self) -> None:
        """Count a change that is no move (`released`, `drained`)."""
        self.num_moves += 1

    def forget(self, key: RoomKey) -> None:
        if self._states[key] not in FINAL:
            raise IllegalTransition(f"room {key}: forgotten in {self._states[key].name}")
        del self._states[key]

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._states

    def __iter__(self) -> Iterator[RoomKey]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
