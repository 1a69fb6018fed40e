"""What ends on one side of a transfer must be known on the other at once, and not by a timeout alone.

When a live room fails on one side, or the process of one side dies, the other side's room must be over, and its role must
have let the request go, within `bound_s`: the longest that the way between two healthy nodes takes here. Excused is only
what had no such way: a partition, a clogged link or a broken connection between the two nodes at that time, or a
process that was frozen.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from disagg.outgoing import HandoverStage
from tools.simulation.network import RESET_S
from tools.simulation.options import Options
from tools.simulation.workers.managers import CONTROL_TURN_S
from tools.simulation.workers.worker import Worker
from tools.simulation.world import Violation, World
from transfer_backends.sides import KVPoll, RoomKey

LOOP_S = 0.05  # a loop's longest rest while it waits for another process
SPIKE = 10.0  # network.py: a delay is now and then this many times as long
LATE_S = 1.5  # what a clogged link held back may still be under way so long after


def bound_s(options: Options) -> float:
    """One message (the longest delay), one poll of each control thread, a turn of each loop; a death: the reset, too."""
    return SPIKE * options.delay_s[1] + 2 * (CONTROL_TURN_S + LOOP_S) + RESET_S


@dataclass(frozen=True, eq=False)
class Side:
    """A manager of a worker: it sends KV, or receives it; or features. The other end of a room is the other kind of side."""

    worker: Worker
    manager: Any
    sends: bool
    features: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        return self.sends, self.features

    def faces(self, other: "Side") -> bool:
        return self.features is other.features and self.sends is not other.sends

    @property
    def name(self) -> str:
        return self.worker.process.name

    def room(self, key: RoomKey) -> Any:
        return self.manager.core.rooms.get(key)


def sides_of(worker: Worker) -> list[Side]:
    managers = worker.managers
    sides = [
        Side(worker, managers.sender, sends=True, features=worker.role_name == "encode"),
        Side(worker, managers.receiver, sends=False),
        Side(worker, managers.features, sends=False, features=True),
    ]
    return [side for side in sides if side.manager is not None]


@dataclass(frozen=True, eq=False)
class Expectation:
    """`teller` failed or died at `since_s`; `hearer` must know by now. `room`: the hearer's, which a duplicate request may open again."""

    teller: Side
    hearer: Side
    key: RoomKey
    room: object
    since_s: float
    why: str


class Notices:
    """Told after every event of a worker; counts what it has judged in `world.seen`."""

    def __init__(self, world: World, options: Options) -> None:
        self._world = world
        self._sides: dict[tuple[str, tuple[bool, bool]], Side] = {}  # of living processes, by incarnation
        self._sides_of: dict[Worker, list[Side]] = {}
        self._moves: dict[Side, int] = {}
        self._failed: dict[Side, set[RoomKey]] = {}
        self._bound_s = bound_s(options)
        self.judged: Counter[str] = Counter()

    def add(self, worker: Worker) -> None:
        self._sides_of[worker] = sides = sides_of(worker)
        for side in sides:
            self._sides[side.name, side.kind] = side
            self._moves[side], self._failed[side] = -1, set()
        worker.process.on_death.append(lambda: self._on_death(worker))

    def look(self, worker: Worker) -> None:
        """After an event of `worker`: which rooms have failed in it?"""
        for side in self._sides_of[worker]:
            self._look_at(side)

    def _look_at(self, side: Side) -> None:
        rooms = side.manager.core.rooms
        if (side.name, side.kind) not in self._sides or rooms.num_moves == self._moves[side]:
            return
        self._moves[side] = rooms.num_moves
        failed = {room.key for room in rooms if room.state is KVPoll.Failed}
        news, self._failed[side] = failed - self._failed[side], failed
        for key in sorted(news):
            other = self._other_side(side, key)
            if other is not None:
                self._expect(side, other, key, str(rooms[key].reason))

    def _on_death(self, worker: Worker) -> None:
        dead = [self._sides.pop((side.name, side.kind)) for side in self._sides_of[worker]]
        for side in dead:
            for other in [other for other in self._sides.values() if other.faces(side)]:
                for room in other.manager.core.rooms:
                    if _partner(other, room.key) == side.name and not room.final:
                        self._expect(side, other, room.key, "it has died")

    def _other_side(self, side: Side, key: RoomKey) -> Side | None:
        """Who must be told: both sides know each other, and the room lives over there."""
        other = self._sides.get((_partner(side, key) or "", (not side.sends, side.features)))
        if other is None or not _is_open(other, key):
            return None
        return other if _partner(other, key) in (None, side.name) else None

    def _expect(self, teller: Side, hearer: Side, key: RoomKey, why: str) -> None:
        wanted = Expectation(teller, hearer, key, hearer.room(key), self._world.now_s, why)
        self._world.after(self._bound_s, "judge a notice", self._judge, wanted)

    def _judge(self, wanted: Expectation) -> None:
        if self._is_excused(wanted):
            self.judged["excused notices"] += 1
            return
        self.judged["notices in time"] += 1
        if wanted.hearer.room(wanted.key) is not wanted.room:
            return
        if _knows(wanted.hearer, wanted.key, wanted.teller.name):
            return
        raise Violation(
            f"{wanted.hearer.name} does not know after {self._bound_s:.2f} s that room {wanted.key} has ended at"
            f" {wanted.teller.name}: {wanted.why}"
        )

    def _is_excused(self, wanted: Expectation) -> bool:
        teller, hearer, since_s = wanted.teller.worker.process, wanted.hearer.worker.process, wanted.since_s
        if not hearer.alive or any(p.frozen or p.thawed_s >= since_s for p in (teller, hearer)):
            return True
        return wanted.teller.worker.around.network.faulty_since(teller.node, hearer.node, since_s - LATE_S)


def _partner(side: Side, key: RoomKey) -> str | None:
    """The process at the other end of a room, when it can be told now; None: unknown."""
    room = side.room(key)
    if side.sends:
        return None if room.peer is None else str(room.peer.incarnation)
    return room.peer.incarnation if room.peer is not None and room.peer.live else None


def _is_open(side: Side, key: RoomKey) -> bool:
    room = side.room(key)
    return room is not None and not room.final


def _knows(hearer: Side, key: RoomKey, teller: str) -> bool:
    """The room is over, or has nothing to do with `teller` any more, and its role has let go of it."""
    if hearer.room(key) is None:
        return True
    if _is_open(hearer, key):
        # Decode, before it gave pages away: it looks for the next life of its prefill worker.
        seeks_another = not hearer.sends and hearer.room(key).peer is None
        return seeks_another or _partner(hearer, key) not in (None, teller)
    return not _role_holds(hearer, key)


def _role_holds(hearer: Side, key: RoomKey) -> bool:
    if hearer.sends:
        outgoing: Any = hearer.worker.exchange.handovers_out()
        return any(e.sender._room.key == key and e.stage is not HandoverStage.ENDING for e in outgoing)
    entries: Any = hearer.worker.exchange.transfers_in(features=hearer.features)
    return any(e.receiver._receiver._room.key == key and e.receiver.poll() is KVPoll.Failed for e in entries)
