"""Decode's side: its pure core, and the manager that runs it in a control thread.

Pools of threads make the calls that block.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from transfer_backends.contract import Caps, Clock, KVArgs, LookupFailed, Route, TargetPages, TransferConfig
from transfer_backends.control_thread import TICK_S, ControlThread, Manager
from transfer_backends.decode.lookup import Connect, Connections, Disconnect, LookUp, PrefillFinder
from transfer_backends.decode.proof import Proofs, Prove
from transfer_backends.decode.rooms import (
    MAX_LOOKUPS_A_SERVER,
    DecodeRoom,
    DecodeRooms,
    LookUpLine,
    PrefillPeer,
    Statuses,
)
from transfer_backends.environment import THIS_MACHINE, Environment
from transfer_backends.fake_transfer import FakeTransfer
from transfer_backends.liveness import of_worker
from transfer_backends.ports import Engine, KVReceiver, Lookup
from transfer_backends.sides import KVPoll, Link, PeerProtocolError, PeerTable
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

# ---- core: messages of prefill workers, deadlines. Pure.
#
# role's thread     rooms          provide, abort, close; states
# control thread    this module    messages (of rooms: rooms.py), lost links, deadlines
#                   connections    to prefill workers; their registration
# thread pools      finder         the prefill worker of a room
#                   proofs         whether a lost prefill worker is dead

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
        """`land_row(row, data)` stores a metadata row."""
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
        return not len(self.rooms) and self.peers.rests

    def open(
        self, room: int, room_attempt: int, bootstrap: str, now_s: float, *, route: Route | None = None
    ) -> DecodeRoom:
        """`route`: names the prefill worker."""
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
        for peer in silent:  # the link stays: the peer may still write
            for room in self.rooms.of(peer):
                self.rooms.abort(room, f"prefill worker {peer.route.control} does not answer", now_s)
        for peer in dead:
            for room in self.rooms.of(peer):
                self.rooms.expose(room, False)
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + SCAN_S_A_ROOM * len(self.rooms)
            for room in self.rooms:
                self._check_deadline(room, now_s)

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


# ---- manager

EAGER_POLL_S = 0.001  # of an engine that needs it, while a peer waits for that
NUM_LOOKUP_THREADS = 8 * MAX_LOOKUPS_A_SERVER  # started on demand; 7 hanging servers slow no other look-up

Command = Connect | Disconnect | LookUp | Prove


class DecodeManager(Manager):
    """Receiver of KV pages. Only `close` blocks; `lookup` runs off-thread."""

    def __init__(
        self,
        kv_args: KVArgs,
        engine: Engine,
        config: TransferConfig,
        *,
        lookup: Lookup,
        clock: Clock = time.monotonic,
        environment: Environment = THIS_MACHINE,
        is_apart: bool = False,
    ) -> None:
        """`is_apart`: the ranks run on several machines."""
        self.incarnation = environment.incarnation()
        self._engine = engine
        self._clock = clock
        self._lookup = lookup
        engine.register(engine.caps.carried(kv_args))
        self.core = DecodeCore(
            incarnation=self.incarnation,
            kv_args=kv_args,
            caps=engine.caps,
            descriptor=engine.descriptor(),
            config=config,
            land_row=partial(environment.write_item, kv_args.aux),
            origin=Origin(environment.mark().host, config.control_host),
            is_apart=is_apart,
        )
        self._port = environment.connect(secret=config.secret)
        self.control = ControlThread(
            self.core,
            self._port,
            name="decode",
            clock=clock,
            execute=self._execute,
            on_turn=self._poll_engine,
            pause_s=self._pause_s,
        )
        self._lookup_pool = environment.pool(NUM_LOOKUP_THREADS, "decode-lookup")
        self._proof_pool = environment.pool(2, "decode-proof")
        self._liveness = environment.liveness

    def receiver(
        self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False, route: Route | None = None
    ) -> KVReceiver:
        """Raises `RoomInUse`, and ValueError for a bad room."""
        if fake:
            return FakeTransfer()
        with self.control.locked() as now_s:
            opened = self.core.open(room, room_attempt, bootstrap, now_s, route=route)
        return Receiver(self.core.rooms, self.control, opened)

    def close(self) -> bool:
        """Abort open transfers, wait some seconds for writes to end, stop the threads.

        Returns False if a peer may still write: keep the memory mapped.
        """
        if not self.control.first_close():
            return self.control.is_quiet
        self.control.abort_all()
        drained = self.control.drain()
        if drained:
            self.control.send_bye()
        self.control.close()
        for pool in (self._lookup_pool, self._proof_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if drained:
            self._engine.close()
        return drained

    # ---- control thread

    def _pause_s(self) -> float:
        return EAGER_POLL_S if self._is_eager() else TICK_S

    def _is_eager(self) -> bool:
        return self._engine.caps.target_must_poll and self.core.connections.eager(self._clock())

    def _poll_engine(self) -> None:
        if self._engine.caps.target_must_poll:
            self._engine.progress(eager=self._is_eager())

    def _execute(self, command: Command) -> Link | None:
        if isinstance(command, Connect):
            return None if self._port.connect(command.link, command.control) else command.link
        if isinstance(command, Disconnect):
            self._port.disconnect(command.link)
        elif isinstance(command, LookUp):
            self._lookup_pool.submit(self._look_up, command)
        else:
            self._proof_pool.submit(self._prove, command)
        return None

    # ---- thread pools

    def _look_up(self, item: LookUp) -> None:
        try:
            route = self._lookup(item.bootstrap, item.room, item.any_but)
        except Exception as error:
            failure = error
            if not isinstance(failure, LookupFailed):
                failure = LookupFailed(f"bootstrap look-up: {type(error).__name__}: {error}")
            with self.control.locked() as now_s:
                self.core.finder.on_lookup_failed(item.bootstrap, item.room, failure, now_s)
        else:
            with self.control.locked() as now_s:
                self.core.finder.on_route(item.bootstrap, item.room, route, now_s)

    def _prove(self, item: Prove) -> None:
        proof = of_worker([self._liveness(mark, item.control) for mark in item.marks])
        with self.control.locked() as now_s:
            self.core.proofs.on_proof(item.incarnation, proof, now_s)


class Receiver:
    def __init__(self, rooms: DecodeRooms, control: ControlThread, room: DecodeRoom) -> None:
        self._rooms = rooms
        self._control = control
        self._room = room

    def poll(self) -> KVPoll:
        return self._room.state

    def provide(self, target: TargetPages) -> None:
        with self._control.locked() as now_s:
            self._rooms.provide(self._room, target, now_s)

    def abort(self, reason: str) -> None:
        with self._control.locked() as now_s:
            self._rooms.abort(self._room, reason, now_s)

    def failure(self) -> str | None:
        return self._room.reason

    def retries(self) -> int:
        return self._room.write_try

    def written_pages(self) -> int:
        return self._room.written_pages

    def drained(self) -> bool:
        return self._room.drained

    def close(self) -> None:
        with self._control.locked():
            self._rooms.close(self._room)
