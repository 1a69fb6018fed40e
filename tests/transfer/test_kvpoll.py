"""The table, tested over all its cells."""

import itertools

import pytest

from transfer_backends.kvpoll import (
    FINAL,
    TRANSITIONS,
    IllegalTransition,
    KVPoll,
    PeerProtocolError,
    RoomInUse,
    TransferMachine,
)

FORWARD = [KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring, KVPoll.Success]
KEY = (7, 0)


def machine_in(state: KVPoll) -> TransferMachine:
    machine = TransferMachine()
    machine.open(KEY)
    path = [KVPoll.Failed] if state is KVPoll.Failed else FORWARD[1 : FORWARD.index(state) + 1]
    for step in path:
        machine.move(KEY, step)
    return machine


def legal(a: KVPoll, b: KVPoll) -> bool:
    """Said a second time, without the table: one step forward, or fail, and nothing after the end."""
    return a not in FINAL and (b is KVPoll.Failed or b == a + 1)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(KVPoll, KVPoll)))
def test_every_cell(a: KVPoll, b: KVPoll) -> None:
    assert (b in TRANSITIONS[a]) == legal(a, b)
    ours, theirs = machine_in(a), machine_in(a)
    if legal(a, b):
        ours.move(KEY, b)
        theirs.move_by_peer(KEY, b)
        assert ours.state(KEY) is theirs.state(KEY) is b
        return
    moves = ours.num_moves
    with pytest.raises(IllegalTransition):
        ours.move(KEY, b)
    with pytest.raises(PeerProtocolError):
        theirs.move_by_peer(KEY, b)
    assert ours.state(KEY) is theirs.state(KEY) is a
    assert ours.num_moves == moves


@pytest.mark.parametrize("state", list(KVPoll))
def test_forget_only_final(state: KVPoll) -> None:
    machine = machine_in(state)
    if state in FINAL:
        machine.forget(KEY)
        assert KEY not in machine
    else:
        with pytest.raises(IllegalTransition):
            machine.forget(KEY)
        assert KEY in machine


def test_rooms() -> None:
    machine = TransferMachine()
    machine.open(KEY)
    with pytest.raises(RoomInUse, match="bootstrap_room 7"):
        machine.open(KEY)
    machine.open((7, 1))
    for bad in ((0, 0), (-1, 0), (2**63, 0), (1, -1)):
        with pytest.raises(ValueError, match="bootstrap_room must be"):
            machine.open(bad)
    with pytest.raises(PeerProtocolError):
        machine.move_by_peer((8, 0), KVPoll.Failed)
    assert list(machine) == [KEY, (7, 1)] and len(machine) == 2
