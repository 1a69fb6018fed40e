"""State of a transfer: KVPoll and its transitions. Pure.

Names and values are SGLang's (`disaggregation/base/conn.py`); ranks agree on the minimum.

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
    """A move that is not in the table. Nothing changed."""


class PeerProtocolError(Exception):
    """A peer sent a message that is not allowed now. Counted and dropped."""


class RoomInUse(ValueError):
    """The room serves another transfer."""
