"""Decode side of all transfers: messages of prefill workers, deadlines. Pure.

role's thread     rooms          provide, abort, close; states
control thread    this module    messages (`statuses`: of rooms), lost links, deadlines
                  connections    to prefill workers; their registration
thread pools      finder         the prefill worker of a room
                  proofs         whether a lost prefill worker is dead
"""

from collections.abc import Callable
from typing import Any

import msgspec

from transfer_backends.contract import Caps, KVArgs, Route, TransferConfig
from transfer_backends.decode.lookup import Connections, PrefillFinder
from transfer_backends.decode.proof import Proofs
from transfer_backends.decode.rooms import DecodeRoom, DecodeRooms, LookUpLine, PrefillPeer
from transfer_backends.peers import Link, PeerTable
from transfer_backends.rooms import KVPoll, PeerProtocolError
from transfer_backends.wire import (
    NOWHERE,
    Bye,
    Drained,
    Message,
    Origin,
    Ping,
    PollRequest,
    Pong,
    Refused,
    Register,
    Registered,
    Status,
    layout_of,
)


class Statuses:
    """Handlers; each raises `PeerProtocolError`, changing nothing.

    Reports of an earlier write try are counted and dropped: they end neither transfer nor exposure.
    """

    def __init__(self, rooms: DecodeRooms, counters: dict[str, int]) -> None:
        self._rooms = rooms
        self._counters = counters

    def on_status(self, peer: PrefillPeer, message: Status, now_s: float) -> None:
        room = self._addressed(peer, message)
        if room is None:
            return
        to = KVPoll(message.state)
        if message.row and to is not KVPoll.Success:
            raise PeerProtocolError(f"room {room.key}: a metadata row with {to.name}")
        if room.final:
            self._on_late(room, to)
        elif to is KVPoll.Failed:
            self._rooms.fail(room, message.reason or "prefill failed", now_s, report=False)
        elif room.num_pages is None or to not in (KVPoll.Transferring, KVPoll.Success):
            raise PeerProtocolError(f"room {room.key}: {to.name} in {room.state.name}")
        else:
            self._advance(room, message, now_s)

    def on_drained(self, peer: PrefillPeer, message: Drained, now_s: float) -> None:
        room = self._addressed(peer, message)
        if room is None:
            return
        if not room.final:
            raise PeerProtocolError(f"room {room.key}: Drained in {room.state.name}")
        self._rooms.expose(room, False)

    def _addressed(self, peer: PrefillPeer, message: Status | Drained) -> DecodeRoom | None:
        room = self._rooms.get((message.room, message.attempt))
        if room is None or room.peer is not peer or message.retry < room.write_try:
            self._counters["late_messages"] += 1
            return None
        if message.retry > room.write_try and room.num_pages is None:
            raise PeerProtocolError(f"room {room.key}: try {message.retry} before it had pages to write")
        self._counters["retried"] += message.retry - room.write_try
        room.write_try = message.retry
        return room

    def _on_late(self, room: DecodeRoom, to: KVPoll) -> None:
        self._counters["late_messages"] += 1
        if to is KVPoll.Success:
            self._rooms.expose(room, False)

    def _advance(self, room: DecodeRoom, message: Status, now_s: float) -> None:
        room.progress_at_s = now_s
        if room.state is KVPoll.WaitingForInput:
            self._rooms.move(room, KVPoll.Transferring)
        if message.state != KVPoll.Success:
            return
        self._rooms.expose(room, False)
        misfit = self._rooms.misfit(room, num_pages=message.num_pages, row=message.row)
        if misfit is None:
            self._rooms.succeed(room, message.row, num_pages=message.num_pages)
        else:
            self._rooms.fail(room, misfit, now_s, report=False)


# ---- core

SCAN_S_A_ROOM = 50e-6  # deadlines are scanned more rarely with more rooms, so that ticks stay cheap
REFUSED = "it refused the connection; start every worker with the same --cluster-secret-file (or all without)"


class DecodeCore:
    def __init__(
        self,
        *,
        incarnation: str,
        kv_args: KVArgs,
        caps: Caps,
        descriptor: bytes,
        config: TransferConfig,
        land_row: Callable[[int, bytes], None],
        origin: Origin = NOWHERE,
        is_apart: bool = False,
    ) -> None:
        """`land_row(row, data)` stores a received metadata row."""
        layout = layout_of(kv_args, backend=caps.name)
        ranks = (msgspec.structs.replace(kv_args.ranks[0], descriptor=descriptor), *kv_args.ranks[1:])
        line = LookUpLine()
        self.peers: PeerTable[PrefillPeer] = PeerTable(incarnation=incarnation, config=config)
        self.connections = Connections(
            self.peers,
            register=lambda dst: Register(incarnation, dst, layout, ranks, kv_args.aux, origin),
            handshake_timeout_s=config.handshake_timeout_s,
        )
        self.proofs = Proofs(
            self.peers, self.connections, settle_s=caps.settle_s, resend_s=caps.resend_s, is_apart=is_apart
        )
        self.rooms = DecodeRooms(
            self.peers,
            line,
            args=kv_args,
            land_row=land_row,
            handshake_timeout_s=config.handshake_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
        )
        self.finder = PrefillFinder(self.rooms, self.peers, self.connections, self.proofs.ended, line)
        self.effects = self.peers.effects
        self._config = config
        self._next_scan_s = 0.0
        statuses = Statuses(self.rooms, self.effects.counters)
        self._handlers: dict[type, Callable[[PrefillPeer, Any, float], None]] = {
            Registered: self._on_registered,
            Refused: self._on_refused,
            Status: statuses.on_status,
            Drained: statuses.on_drained,
            PollRequest: lambda peer, message, now_s: self.connections.on_poll_request(now_s),
            Ping: self.peers.on_ping,
            Pong: lambda peer, message, now_s: None,
            Bye: self._on_bye,
        }

    @property
    def is_quiet(self) -> bool:
        return self.rooms.num_exposed == 0

    @property
    def rests(self) -> bool:
        """Only heartbeats are due."""
        return not len(self.rooms) and self.peers.rests

    def open(
        self, room: int, room_attempt: int, bootstrap: str, now_s: float, *, route: Route | None = None
    ) -> DecodeRoom:
        """Open a room and find its prefill worker, unless `route` names it."""
        opened = self.rooms.open(room, room_attempt, bootstrap, now_s, route=route)
        self.finder.seek(opened, now_s)
        return opened

    @property
    def gauges(self) -> dict[str, int]:
        pending, exposed = self.rooms.num_pending_aborts, self.rooms.num_exposed
        return {
            "rooms": len(self.rooms) - pending,
            "farewells": pending,
            "peers": len(self.peers),
            "exposed_rooms": exposed,
        }

    def abort_all(self, reason: str, now_s: float) -> None:
        for room in self.rooms:
            self.rooms.abort(room, reason, now_s)

    def send_bye(self) -> None:
        for peer in self.peers:
            if peer.live:
                self.peers.send(peer, Bye(*self.peers.address(peer)))

    # ---- messages and links

    def on_message(self, link: Link, message: Message, now_s: float) -> None:
        """Raises `PeerProtocolError`, changing nothing."""
        peer = self.peers.by_link(link)
        if peer is None:
            return
        mine = message.dst == self.peers.incarnation
        if not mine or (message.src != peer.incarnation and not isinstance(message, Refused)):
            raise PeerProtocolError(f"{type(message).__name__} from or for another incarnation")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise PeerProtocolError(f"{type(message).__name__} is not for a decode worker")
        peer.heartbeat.on_message(now_s)
        handler(peer, message, now_s)

    def on_link_closed(self, link: Link, now_s: float, *, refused: bool = False) -> None:
        peer = self.peers.by_link(link)
        if peer is not None:
            self._lose(peer, REFUSED if refused else "the connection was lost", now_s)

    def _lose(self, peer: PrefillPeer, why: str, now_s: float) -> None:
        self.finder.drop_routes(peer.incarnation)
        rooms = self.rooms.of(peer)
        self.proofs.on_lost(peer, now_s)
        why = f"prefill worker {peer.route.control}: {why}"
        for room in rooms:
            if room.state is KVPoll.Bootstrapping:
                self.finder.seek_again(room, why, now_s)
            elif not room.final:
                self.rooms.fail(room, why, now_s, report=False)
        if peer in self.peers and peer.lost and not any(room.exposed for room in rooms):
            self.connections.drop(peer)

    def _on_registered(self, peer: PrefillPeer, message: Registered, now_s: float) -> None:
        if peer.registered:
            raise PeerProtocolError("registered twice")
        self.proofs.exhume(peer.incarnation)
        for key in self.connections.on_registered(peer, message.marks):
            self.rooms.send_abort(peer, key, "aborted before the handshake")
        for room in self.rooms.of(peer):
            if room.state is KVPoll.Bootstrapping:
                self.rooms.move(room, KVPoll.WaitingForInput)
            elif room.exposed:
                self.rooms.send_abort(peer, room.key, room.reason or "")

    def _on_refused(self, peer: PrefillPeer, message: Refused, now_s: float) -> None:
        """If `stale`, look up the successor: the incarnation ended or forgot us."""
        if peer.marks or message.stale:
            self._lose(peer, message.reason, now_s)
            if message.src != peer.incarnation:
                self.proofs.on_successor(peer, now_s)
            return
        self.finder.drop_routes(peer.incarnation)
        self.connections.drop(peer)
        for room in self.rooms.of(peer):
            if not room.final:
                self.rooms.fail(room, f"prefill worker refused: {message.reason}", now_s, report=False)

    def _on_bye(self, peer: PrefillPeer, message: Bye, now_s: float) -> None:
        """End exposures: all the peer's operations are final."""
        rooms = self.rooms.of(peer)
        self._lose(peer, "it shut down", now_s)
        self.proofs.bury(peer.incarnation, now_s)
        for room in rooms:
            self.rooms.expose(room, False)
        if peer in self.peers:
            self.connections.drop(peer)

    # ---- time

    def tick(self, now_s: float) -> None:
        silent, dead, overdue = self.peers.beat(now_s), self.proofs.tick(now_s), self.connections.overdue(now_s)
        for peer in overdue:
            self._lose(peer, "it has not answered the registration", now_s)
        for peer in silent:
            self._on_silent(peer, now_s)
        for peer in dead:
            for room in self.rooms.of(peer):
                self.rooms.expose(room, False)
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + SCAN_S_A_ROOM * len(self.rooms)
            for room in self.rooms:
                self._check_deadline(room, now_s)

    def _on_silent(self, peer: PrefillPeer, now_s: float) -> None:
        """Fail the rooms, keep the link: the peer may still write."""
        for room in self.rooms.of(peer):
            self.rooms.abort(room, f"prefill worker {peer.route.control} does not answer", now_s)

    def _check_deadline(self, room: DecodeRoom, now_s: float) -> None:
        state, config = room.state, self._config
        if room.retry.due(now_s) and now_s < room.deadline_s:
            self.finder.seek(room, now_s)
        seeking = state is KVPoll.Bootstrapping or room.seeking
        if seeking and now_s >= room.deadline_s:
            reason = f"handshake timed out after {config.handshake_timeout_s:g} s: {room.error}"
            self.finder.give_up(room, reason, now_s)
        elif state is KVPoll.WaitingForInput and room.num_pages is not None:
            self._limit(room, config.waiting_timeout_s, "prefill sent nothing", now_s)
        elif state is KVPoll.Transferring:
            self._limit(room, config.transfer_timeout_s, "the transfer made no progress", now_s)
        elif room.exposed and room.stuck_at_s is not None and now_s >= room.stuck_at_s:
            room.stuck_at_s = None
            self.effects.counters["stuck_rooms"] += 1

    def _limit(self, room: DecodeRoom, timeout_s: float, what: str, now_s: float) -> None:
        if now_s - room.progress_at_s >= timeout_s:
            self.rooms.fail(room, f"{what} for {timeout_s:g} s", now_s)

    def check(self) -> None:
        self.peers.check()
        self.rooms.check()
