"""The table, tested over all its cells."""

import itertools

import pytest

from transfer_backends.sides import FINAL, TRANSITIONS, IllegalTransition, KVPoll, Room, RoomInUse, RoomTable

FORWARD = [KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring, KVPoll.Success]


def room_in(state: KVPoll) -> tuple[RoomTable[Room], Room]:
    rooms, room = RoomTable[Room](), Room((7, 0))
    rooms.add(room)
    for step in [KVPoll.Failed] if state is KVPoll.Failed else FORWARD[1 : FORWARD.index(state) + 1]:
        rooms.move(room, step)
    return rooms, room


def legal(a: KVPoll, b: KVPoll) -> bool:
    """Said a second time, without the table: one step forward, or fail, and nothing after the end."""
    return a not in FINAL and (b is KVPoll.Failed or b == a + 1)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(KVPoll, KVPoll)))
def test_every_cell(a: KVPoll, b: KVPoll) -> None:
    assert (b in TRANSITIONS[a]) == legal(a, b)
    rooms, room = room_in(a)
    moves = rooms.num_moves
    if legal(a, b):
        rooms.move(room, b)
        assert room.state is b and rooms.num_moves == moves + 1
        return
    with pytest.raises(IllegalTransition):
        rooms.move(room, b)
    assert room.state is a and rooms.num_moves == moves


@pytest.mark.parametrize("state", list(KVPoll))
def test_forget_only_final(state: KVPoll) -> None:
    rooms, room = room_in(state)
    if state in FINAL:
        rooms.forget(room)
        assert rooms.get(room.key) is None
    else:
        with pytest.raises(IllegalTransition):
            rooms.forget(room)
        assert rooms[room.key] is room


def test_rooms() -> None:
    rooms: RoomTable[Room] = RoomTable()
    rooms.add(Room((7, 0)))
    with pytest.raises(RoomInUse, match="bootstrap_room 7"):
        rooms.add(Room((7, 0)))
    rooms.add(Room((7, 1)))
    for bad in ((0, 0), (-1, 0), (2**63, 0), (1, -1)):
        with pytest.raises(ValueError, match="bootstrap_room must be"):
            rooms.add(Room(bad))
    assert [room.key for room in rooms] == [(7, 0), (7, 1)] and len(rooms) == 2
