"""Search for a room's prefill worker, and connections to those found. Pure.

A bootstrap server with one prefill worker is looked up once per DP rank; with several (*shared*)
once per room.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from transfer_backends.contract import LookupFailed, Route
from transfer_backends.decode.rooms import DecodeRoom, DecodeRooms, LookUpLine, PrefillPeer
from transfer_backends.liveness import ProcessMark
from transfer_backends.sides import KVPoll, Link, PeerTable, RoomKey
from transfer_backends.wire import Register

# ---- Connections to prefill workers. Pure.

MAX_GONE = 32
EAGER_S = 0.25  # after a poll request; the next one comes earlier if needed


@dataclass(frozen=True)
class Connect:
    link: Link
    control: str


@dataclass(frozen=True)
class Disconnect:
    link: Link


class Connections:
    """Links to prefill workers; recompute look-ups exclude the recently dropped `gone`."""

    def __init__(
        self, peers: PeerTable[PrefillPeer], *, register: Callable[[str], Register], handshake_timeout_s: float
    ) -> None:
        self.gone: deque[str] = deque(maxlen=MAX_GONE)
        self._peers = peers
        self._queue = peers.effects.queue
        self._register = register
        self._handshake_timeout_s = handshake_timeout_s
        self._next_link = 1
        self._eager_until_s = 0.0

    def obtain(self, route: Route, now_s: float) -> PrefillPeer:
        peer = self._peers.get(route.incarnation)
        if peer is None:
            peer = PrefillPeer(route.incarnation, self._peers.heartbeat(now_s), deadline_s=0.0, route=route)
            self._peers.add(peer)
            self.connect(peer, now_s)
        return peer

    def connect(self, peer: PrefillPeer, now_s: float) -> None:
        peer.deadline_s = now_s + self._handshake_timeout_s
        peer.registered = False
        self._peers.join(peer, self._next_link)
        self._queue.append(Connect(self._next_link, peer.route.control))
        self._next_link += 1
        self._peers.send(peer, self._register(peer.incarnation))

    def on_registered(self, peer: PrefillPeer, marks: tuple[ProcessMark, ...]) -> list[RoomKey]:
        """Rooms whose abort waited for it."""
        peer.registered = True
        peer.marks = marks
        peer.proof.reset()
        aborts, peer.unsent_aborts = peer.unsent_aborts, []
        return aborts

    def disconnect(self, peer: PrefillPeer) -> None:
        if peer.link is not None:
            self._queue.append(Disconnect(peer.link))
            self._peers.part(peer)

    def drop(self, peer: PrefillPeer) -> None:
        self.disconnect(peer)
        self._peers.drop(peer)
        self.gone.append(peer.incarnation)

    def overdue(self, now_s: float) -> list[PrefillPeer]:
        return [peer for peer in self._peers if peer.connecting and now_s >= peer.deadline_s]

    def on_poll_request(self, now_s: float) -> None:
        self._eager_until_s = now_s + EAGER_S

    def eager(self, now_s: float) -> bool:
        """A peer connects or waits for its writes: poll the engine often.

        Shared memory and RDMA need no polls, and each one interrupts a decode step.
        """
        return now_s < self._eager_until_s or any(peer.connecting for peer in self._peers)


# ---- Search: look-ups, cached routes, retries. Pure.

MAX_SERVERS = 4096  # remembered bootstrap servers; requests name them

V = TypeVar("V")


@dataclass(frozen=True)
class LookUp:
    """A command to query a bootstrap server off-thread.

    `any_but`: any prefill worker but these incarnations.
    """

    bootstrap: str
    room: int
    any_but: tuple[str, ...] | None = None


@dataclass(eq=False)
class PrefillFinder:
    """`ended`: dead incarnations, and until when they are remembered."""

    _rooms: DecodeRooms
    _peers: PeerTable[PrefillPeer]
    _connections: Connections
    _ended: Mapping[str, float]
    _line: LookUpLine
    # by rank, for bootstrap servers with one prefill worker
    _routes: dict[str, dict[int, Route]] = field(default_factory=dict)
    _shared: dict[str, None] = field(default_factory=dict)  # bootstrap servers with several workers

    def seek(self, room: DecodeRoom, now_s: float) -> None:
        room.retry.at_s = None
        route = self._known(room)
        if route is not None:
            self._attach(room, route, now_s)
            return
        under_way = any(other.looking and self._same_rank(other, room) for other in self._seekers(room.bootstrap, None))
        room.looking = True
        if not under_way or room.bootstrap in self._shared:
            self._look_up(room)

    def seek_again(self, room: DecodeRoom, error: str, now_s: float) -> None:
        """Retry later, unless the room recomputes or names its worker."""
        if room.recomputes or room.route is not None:
            self.give_up(room, error, now_s)
            return
        room.peer = None
        room.looking = False
        room.error = room.failure = error
        room.retry.plan(now_s)

    def give_up(self, room: DecodeRoom, reason: str, now_s: float) -> None:
        room.end_search()
        if room.state is not KVPoll.Failed:
            self._rooms.fail(room, reason, now_s)
        self._rooms.forget_if_closed(room)

    def drop_routes(self, incarnation: str) -> None:
        for bootstrap, routes in list(self._routes.items()):
            for rank in [rank for rank, route in routes.items() if route.incarnation == incarnation]:
                del routes[rank]
            if not routes:
                del self._routes[bootstrap]

    # ---- results; each look-up has one

    def on_route(self, bootstrap: str, room: int, route: Route, now_s: float) -> None:
        self._use_route(bootstrap, room, route, now_s)
        self._next_in_line(bootstrap)

    def on_lookup_failed(self, bootstrap: str, room: int, error: LookupFailed, now_s: float) -> None:
        if error.of_room:
            self._on_shared(bootstrap, room, now_s)
        for waiting in self._seekers(bootstrap, room if bootstrap in self._shared else None):
            self.seek_again(waiting, str(error), now_s)
            if error.permanent:
                self.give_up(waiting, str(error), now_s)
        self._next_in_line(bootstrap)

    # ---- inside

    def _look_up(self, room: DecodeRoom) -> None:
        if self._line.begin(room.bootstrap, room.key):
            any_but = tuple(self._connections.gone) if room.recomputes else None
            self._peers.effects.queue.append(LookUp(room.bootstrap, room.key[0], any_but))

    def _next_in_line(self, bootstrap: str) -> None:
        self._line.end(bootstrap)
        while (key := self._line.take(bootstrap)) is not None:
            room = self._rooms[key]  # a forgotten room leaves the queue
            if room.looking and room.peer is None:
                self._look_up(room)
                return

    def _known(self, room: DecodeRoom) -> Route | None:
        if room.route is not None:
            return room.route
        routes = self._routes.get(room.bootstrap, {}).values()
        return next((route for route in routes if route.has(room.key[0])), None)

    def _same_rank(self, one: DecodeRoom, other: DecodeRoom) -> bool:
        dp_size = next((route.dp_size for route in self._routes.get(one.bootstrap, {}).values()), 1)
        return one.key[0] % dp_size == other.key[0] % dp_size

    def _use_route(self, bootstrap: str, number: int, route: Route, now_s: float) -> None:
        if not route.shared:
            self._shared.pop(bootstrap, None)
            known = self._routes.get(bootstrap, {})
            kept = {rank: other for rank, other in known.items() if other.dp_size == route.dp_size}
            _remember(self._routes, bootstrap, {**kept, route.dp_rank: route})
            others = []
            for room in self._seekers(bootstrap, None):
                if route.has(room.key[0]) or room.key[0] == number:
                    self._attach(room, route, now_s)
                else:
                    others.append(room)
            if not kept:  # the ranks were unknown: these rooms waited for this look-up
                self._seek_other_ranks(others, now_s)
            return
        for room in self._seekers(bootstrap, number):
            self._attach(room, route, now_s)
        self._on_shared(bootstrap, number, now_s)

    def _seek_other_ranks(self, rooms: list[DecodeRoom], now_s: float) -> None:
        waiting = [room for room in rooms if room.looking]
        for room in waiting:
            room.looking = False
        for room in waiting:
            self.seek(room, now_s)

    def _on_shared(self, bootstrap: str, number: int, now_s: float) -> None:
        """Waiting rooms need their own look-ups."""
        waiting = [] if bootstrap in self._shared else self._seekers(bootstrap, None)
        _remember(self._shared, bootstrap, None)
        for room in waiting:
            if room.looking and room.key[0] != number:
                self.seek(room, now_s)

    def _attach(self, room: DecodeRoom, route: Route, now_s: float) -> None:
        room.end_search()
        if now_s < self._ended.get(route.incarnation, now_s):
            self._on_dead_owner(room, route, now_s)
            return
        if self._peers.get(route.incarnation) is None and self._peers.is_full:
            reason = f"decode talks to {len(self._peers)} prefill workers, no more fit (max_peers)"
            self.give_up(room, reason, now_s)
            return
        peer = self._connections.obtain(route, now_s)
        if peer.lost or peer.heartbeat.silent:
            self.drop_routes(peer.incarnation)
            self.seek_again(room, f"prefill worker {route.control} does not answer", now_s)
            return
        room.peer = peer
        room.error = f"prefill worker {route.control} has not answered the registration"
        if room.failure is not None:
            room.error += f" (the try before: {room.failure})"
        if room.state is KVPoll.Failed:
            self._rooms.report_abort(room, peer)
        elif peer.live:
            self._rooms.move(room, KVPoll.WaitingForInput)

    def _on_dead_owner(self, room: DecodeRoom, route: Route, now_s: float) -> None:
        """Fail a shared server's room; others wait for a new incarnation."""
        self.drop_routes(route.incarnation)
        error = f"prefill worker {route.control} has ended"
        if route.shared:
            self.give_up(room, error, now_s)
        else:
            self.seek_again(room, error, now_s)

    def _seekers(self, bootstrap: str, number: int | None) -> list[DecodeRoom]:
        return [
            room
            for room in self._rooms
            if room.peer is None
            and room.route is None
            and room.bootstrap == bootstrap
            and room.seeking
            and number in (None, room.key[0])
        ]


def _remember(table: dict[str, V], name: str, value: V) -> None:
    table.pop(name, None)
    table[name] = value
    while len(table) > MAX_SERVERS:
        del table[next(iter(table))]
