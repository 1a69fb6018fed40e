"""The state of a transfer: KVPoll values and the table of legal moves. Rooms (rooms.py) move by it. Pure.

Names and values are SGLang's (`disaggregation/base/conn.py`). They are ordered, so that several ranks can agree by MIN.

    Bootstrapping --> WaitingForInput --> Transferring --> Success
          |                 |                  |
          +-----------------+------------------+---------> Failed
"""

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
