"""Prefill side of all transfers: messages of decode workers, deadlines. Pure.

role's thread     rooms          open, send, abort, close; states
sender thread     outbox         what to post next, and its window
                  completions    what follows the end of an operation
                  paths          connections to decode workers' memory; admission: registration
control thread    this module    messages (`offers`: of rooms), lost links, deadlines
"""

from collections.abc import Callable
from typing import Any

from transfer_backends.contract import Caps, KVArgs, TransferConfig
from transfer_backends.kvpoll import KVPoll, PeerProtocolError
from transfer_backends.liveness import ProcessMark
from transfer_backends.peers import Link, PeerTable
from transfer_backends.prefill.admission import PeerAdmission
from transfer_backends.prefill.completions import Completions
from transfer_backends.prefill.inbox import Inbox
from transfer_backends.prefill.offers import Offers
from transfer_backends.prefill.outbox import Outbox
from transfer_backends.prefill.paths import DecodePeer, Paths
from transfer_backends.prefill.room import PrefillRoom
from transfer_backends.prefill.rooms import PrefillRooms
from transfer_backends.wire import Abort, Bye, Message, Ping, Pong, Recompute, Register, TransferInfo

SCAN_S_A_ROOM = 50e-6  # deadlines are scanned more rarely with more rooms, so that ticks stay cheap


class PrefillCore:
    def __init__(
        self,
        *,
        incarnation: str,
        marks: tuple[ProcessMark, ...],
        kv_args: KVArgs,
        caps: Caps,
        config: TransferConfig,
        computes: bool = True,
    ) -> None:
        """`computes`: accept recompute requests."""
        self.peers: PeerTable[DecodePeer] = PeerTable(incarnation=incarnation, config=config)
        self.paths = Paths(self.peers, settle_s=caps.settle_s, resend_s=caps.resend_s)
        self.admission = PeerAdmission(
            self.peers,
            self.paths,
            marks=marks,
            kv_args=kv_args,
            backend=caps.name,
            handshake_timeout_s=config.handshake_timeout_s,
        )
        self.inbox = Inbox(
            keep_s=config.bootstrap_timeout_s, max_offers=config.max_orphans, max_tombstones=config.max_tombstones
        )
        self.effects = self.peers.effects
        self.outbox = Outbox(self.peers, args=kv_args, caps=caps)
        self.rooms = PrefillRooms(self.peers, self.paths, self.inbox, self.outbox, args=kv_args)
        self.completions = Completions(
            self.rooms, self.outbox, self.paths, self.peers, transfer_retries=config.transfer_retries
        )
        self._config = config
        self._next_scan_s = 0.0
        offers = Offers(self.rooms, self.inbox, self.paths, computes=computes)
        self._handlers: dict[type, Callable[[DecodePeer, Any, float], None]] = {
            TransferInfo: offers.on_transfer_info,
            Recompute: offers.on_recompute,
            Abort: offers.on_abort,
            Ping: self.peers.on_ping,
            Pong: lambda peer, message, now_s: None,
            Bye: lambda peer, message, now_s: self._lose(peer, "the decode worker shut down", now_s),
        }

    @property
    def wants_driver(self) -> bool:
        return bool(self.paths.commands) or self.outbox.has_work

    @property
    def is_quiet(self) -> bool:
        return self.outbox.num_inflight == 0 and all(room.quiet for room in self.rooms)

    @property
    def rests(self) -> bool:
        """Only heartbeats are due."""
        if len(self.rooms) or len(self.inbox) or self.wants_driver or not self.peers.rests:
            return False
        return self.outbox.num_inflight == 0 and all(peer.path.rests for peer in self.peers)

    @property
    def gauges(self) -> dict[str, int]:
        return {"rooms": len(self.rooms), "peers": len(self.peers.linked())}

    def abort_all(self, reason: str, now_s: float) -> None:
        for room in self.rooms:
            self.rooms.abort(room, reason)

    def send_bye(self) -> None:
        """Send `Bye` to peers whose memory no operation can write."""
        busy = {room.peer for room in self.rooms if not room.quiet}
        for peer in self.peers.linked():
            if peer not in busy and not peer.path.landing:
                self.peers.send(peer, Bye(*self.peers.address(peer)))

    # ---- messages and links

    def on_message(self, link: Link, message: Message, now_s: float) -> None:
        """Raises `PeerProtocolError`, changing nothing."""
        if isinstance(message, Register):
            known = self.admission.register(link, message, now_s)
            if known is not None:
                self.rooms.fail_all_of(known, "the decode worker connected again")
            return
        peer = self.peers.by_link(link)
        if peer is None or message.dst != self.peers.incarnation or message.src != peer.incarnation:
            if not isinstance(message, Bye):
                self.admission.refuse(link, message.src, "not registered with this prefill worker", stale=True)
            return
        if not peer.registered:
            raise PeerProtocolError(f"{type(message).__name__} before the registration was answered")
        peer.heartbeat.on_message(now_s)
        handler = self._handlers.get(type(message))
        if handler is None:
            raise PeerProtocolError(f"{type(message).__name__} is not for a prefill worker")
        handler(peer, message, now_s)

    def on_link_closed(self, link: Link, now_s: float, *, refused: bool = False) -> None:
        peer = self.peers.by_link(link)
        if peer is not None:
            self._lose(peer, "the decode worker's connection was lost", now_s)

    def _lose(self, peer: DecodePeer, reason: str, now_s: float) -> None:
        self.effects.counters["peers_lost"] += 1
        self.peers.part(peer)
        self.rooms.fail_all_of(peer, reason)
        for key in self.inbox.take_all_of(peer):
            self.inbox.bury(key, reason, by_peer=True, now_s=now_s)
        self.paths.retire(peer)

    # ---- time

    def tick(self, now_s: float) -> None:
        self.admission.tick(now_s)
        settled, landed = self.paths.tick(now_s)
        for peer in self.peers.beat(now_s):
            self.rooms.fail_all_of(peer, "the decode worker does not answer")
        for peer in settled:
            self.completions.settle(peer)
        for peer in landed:
            self.completions.start_over(peer)
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + SCAN_S_A_ROOM * len(self.rooms)
            for room in self.rooms:
                self.check_deadline(room, now_s)
        self._expire(now_s)
        self.peers.check_links()

    def check_deadline(self, room: PrefillRoom, now_s: float) -> None:
        state, config = room.state, self._config
        if state is KVPoll.Bootstrapping and now_s - room.opened_at_s >= config.bootstrap_timeout_s:
            timeout_s = config.bootstrap_timeout_s
            self.rooms.fail(room, f"no decode worker gave its pages within {timeout_s:g} s (bootstrap timeout)")
        busy = state is KVPoll.Transferring and (room.num_ops or room.posts or room.chunks or room.awaits_fence)
        stalled = busy and not self.outbox.waits_for_compute(room)
        if stalled and now_s - room.progress_at_s >= config.transfer_timeout_s:
            self.rooms.fail(room, f"the transfer made no progress for {config.transfer_timeout_s:g} s")

    def _expire(self, now_s: float) -> None:
        for key, offer in self.inbox.expire(now_s):
            self.effects.counters["orphans_expired"] += 1
            reason = f"no request for it came to prefill within {self._config.bootstrap_timeout_s:g} s"
            self.inbox.bury(key, reason, by_peer=True, now_s=now_s)
            self.rooms.reject(offer.peer, key, reason)

    def check(self) -> None:
        self.peers.check()
        self.paths.check()
        self.inbox.check()
        self.rooms.check()
        inflight, ops = self.outbox.num_inflight, sum(room.num_ops for room in self.rooms)
        assert inflight == 0 or (inflight > 0 and ops), f"{inflight} pieces in flight without a room"
