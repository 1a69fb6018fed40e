"""Prefill side of all transfers: messages of decode workers, deadlines. Pure.

role's thread     rooms          open, send, abort, close; states
sender thread     outbox         what to post next, and its window
                  completions    what follows the end of an operation
                  paths          connections to decode workers' memory; admission: registration
control thread    this module    messages (`offers`: of rooms), lost links, deadlines
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfer_backends.contract import (
    ABORTED_BY_DECODE,
    I64,
    NO_PREFIXES,
    Caps,
    KVArgs,
    PeerWork,
    RecomputeRequest,
    TransferConfig,
    Work,
)
from transfer_backends.liveness import ProcessMark
from transfer_backends.prefill.inbox import Inbox, Offer, Post
from transfer_backends.prefill.paths import DecodePeer, Paths, PeerAdmission
from transfer_backends.prefill.rooms import Outbox, PrefillRoom, PrefillRooms
from transfer_backends.sides import KVPoll, Link, PeerProtocolError, PeerTable, RoomKey
from transfer_backends.wire import Abort, Bye, Message, Ping, Pong, Recompute, Register, TransferInfo, unpack_ids

# ---- messages of decode workers about rooms: pages, recomputation, aborts

NO_PROMPTS = "this is a decode worker: it computes no prompts"


class Offers:
    """Handlers; each raises `PeerProtocolError`, changing nothing."""

    def __init__(self, rooms: PrefillRooms, inbox: Inbox, paths: Paths, *, takes: PeerWork) -> None:
        self._rooms = rooms
        self._inbox = inbox
        self._paths = paths
        self._takes = takes

    def on_transfer_info(self, peer: DecodePeer, message: TransferInfo, now_s: float) -> None:
        key = (message.room, message.attempt)
        with self._rejecting(peer, key):
            offer = _offer_of(peer, message)
        room, tombstone = self._rooms.get(key), self._inbox.tombstone(key)
        if room is None and tombstone is None:
            self._keep(peer, key, offer, now_s)
        elif room is None:
            assert tombstone is not None
            self._rooms.reject(peer, key, f"prefill: {tombstone.reason}")
        elif room.state is KVPoll.Bootstrapping:
            self._rooms.accept(room, offer)
        elif room.peer is None:
            self._rooms.reject(peer, key, f"prefill: {room.reason}")
        elif room.peer.incarnation == peer.incarnation:
            raise PeerProtocolError(f"room {key}: a second transfer info")
        else:
            self._rooms.reject(peer, key, f"bootstrap_room {message.room} is in use by another decode worker")

    def on_recompute(self, peer: DecodePeer, message: Recompute, now_s: float) -> None:
        key = (message.room, message.attempt)
        with self._rejecting(peer, key):
            offer, request = _offer_of(peer, message), _request_of(message)
        if (PeerWork.PREFIXES if message.cached else PeerWork.PROMPTS) not in self._takes:
            self._rooms.reject(peer, key, NO_PREFIXES if message.cached else NO_PROMPTS)
            return
        known = self._rooms.get(key) or self._inbox.tombstone(key) or self._inbox.owner(key)
        if known is not None:
            self._rooms.reject(peer, key, f"bootstrap_room {message.room}: attempt {message.attempt} exists already")
        elif self._inbox.keep_request(request, offer, now_s):
            self._rooms.touch()
        else:
            self._rooms.reject(peer, key, "prefill has too much to compute for decode workers already")

    def on_abort(self, peer: DecodePeer, message: Abort, now_s: float) -> None:
        key = (message.room, message.attempt)
        room = self._rooms.get(key)
        if room is None:
            self._abort_unopened(peer, key, message, now_s)
            return
        if room.peer is not None and room.peer.incarnation != peer.incarnation:
            self._paths.drained(peer, key, message.retry)  # nothing of this room is written there
            raise PeerProtocolError(f"room {key}: aborted by a decode worker it does not belong to")
        if not room.final:
            self._rooms.fail(room, f"{ABORTED_BY_DECODE}: {message.reason}", report=False)
        if room.quiet:
            room.owes_drained = False
            self._paths.drained(peer, key, room.write_try)
        else:
            room.owes_drained = True

    def _abort_unopened(self, peer: DecodePeer, key: RoomKey, message: Abort, now_s: float) -> None:
        if self._inbox.owner(key) in (None, peer.incarnation):
            self._inbox.take(key)
            if self._inbox.tombstone(key) is None:
                reason = f"{ABORTED_BY_DECODE}: {message.reason}"
                self._inbox.bury(key, reason, by_peer=True, now_s=now_s)
        self._paths.drained(peer, key, message.retry)

    def _keep(self, peer: DecodePeer, key: RoomKey, offer: Offer, now_s: float) -> None:
        owner = self._inbox.owner(key)
        if owner == peer.incarnation:
            raise PeerProtocolError(f"room {key}: a second transfer info")
        if owner is not None:
            self._rooms.reject(peer, key, f"bootstrap_room {key[0]} is in use by another decode worker")
        elif not self._inbox.keep(key, offer, now_s):
            reason = f"prefill keeps {len(self._inbox)} transfers without a request: it takes no more"
            self._rooms.reject(peer, key, reason)

    @contextmanager
    def _rejecting(self, peer: DecodePeer, key: RoomKey) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            self._rooms.reject(peer, key, str(error))
            raise PeerProtocolError(str(error)) from None


def _offer_of(peer: DecodePeer, message: TransferInfo | Recompute) -> Offer:
    memory, pages = peer.path.memory, unpack_ids(message.pages)
    if len(pages) and not (pages.min() >= 0 and pages.max() < memory.num_pages):
        raise ValueError(f"room {message.room}: a page is outside decode's pool of {memory.num_pages}")
    if len(np.unique(pages)) != len(pages):
        raise ValueError(f"room {message.room}: a page is given twice")
    if message.aux_idx >= memory.aux.num_items:
        raise ValueError(f"room {message.room}: aux_idx {message.aux_idx} is outside {memory.aux.num_items} rows")
    partial = isinstance(message, Recompute) and message.cached
    return Offer(peer, pages, message.aux_idx, message.skip_pages, _tail_of(peer, message), partial)


def _tail_of(peer: DecodePeer, message: TransferInfo | Recompute) -> tuple[I64, ...]:
    memory, tail = peer.path.memory, tuple(unpack_ids(ids) for ids in message.tail)
    if len(tail) != len(memory.layout.pools):
        raise ValueError(f"room {message.room}: items of {len(tail)} pools, there are {len(memory.layout.pools)}")
    for number, ids in enumerate(tail):
        if len(ids) and not (ids.min() >= 0 and ids.max() < memory.num_items(number)):
            raise ValueError(
                f"room {message.room}: an item is outside decode's pool {number} of {memory.num_items(number)}"
            )
        if len(np.unique(ids)) != len(ids):
            raise ValueError(f"room {message.room}: an item of pool {number} is given twice")
    return tail


def _request_of(message: Recompute) -> RecomputeRequest:
    tokens = unpack_ids(message.tokens)
    if not len(tokens) or tokens.min() < 0:
        raise ValueError(f"room {message.room}: {len(tokens)} tokens to compute, or a negative one")
    work = Work(
        tokens=tokens.tolist(),
        priority=message.priority,
        share=message.share,
        namespace=message.namespace,
        cached=message.cached,
        images=message.images,
        variant=message.variant,
    )
    return RecomputeRequest(message.room, message.attempt, work)


# ---- ends of operations

PROGRESS_EVERY_S = 0.25  # each report wakes threads of both sides during a step


@dataclass(eq=False)
class Completions:
    """End of engine operations.

    After a failed write prefill writes everything again (`transfer_retries`), once nothing of the
    last try can land (paths.py). Results of earlier tries are dropped (docs/design/handover.md).
    """

    _rooms: PrefillRooms
    _outbox: Outbox
    _paths: Paths
    _peers: PeerTable[DecodePeer]
    _counters: dict[str, int]
    transfer_retries: int

    def on_op_final(self, post: Post, *, ok: bool, error: str, now_s: float) -> None:
        """If not `ok`, bytes may still land until a fence."""
        room = self._rooms[post.key]
        peer = room.peer
        assert peer is not None and peer in self._peers, "a room and its peer outlive their operations"
        self._outbox.on_op_final(room, post)
        room.dirty |= not ok
        if room.final:  # its pages may be free now
            self._rooms.touch()
        self._paths.on_op_final(peer, post.pieces, ok=ok, now_s=now_s)
        if ok:
            self._on_written(room, post, now_s)
        else:
            self._counters["failed_posts"] += 1
            if not room.final and not room.awaits_fence:
                self._try_again(room, peer, error, now_s)
        self._rooms.report_drained(room)
        self._paths.retire(peer)

    def on_fenced(self, incarnation: str, *, ok: bool, now_s: float) -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        dirty = [room.key for room in self._rooms.of(peer) if room.dirty]
        if self._paths.on_fenced(peer, dirty, ok=ok, now_s=now_s):
            self.settle(peer)

    def settle(self, peer: DecodePeer) -> None:
        """Release our pages: no failed operation reads them."""
        for room in self._rooms.of(peer):
            if room.num_ops == 0:
                room.dirty = False
                self._rooms.touch()
                self._rooms.report_drained(room)
        self.start_over(peer)

    def start_over(self, peer: DecodePeer) -> None:
        """Start the next try of rooms without bytes under way."""
        for room in self._rooms.of(peer):
            if room.awaits_fence and room.quiet and room.key not in peer.path.landing:
                room.start_over()
                self._outbox.add(room)
        self._paths.retire(peer)

    def _on_written(self, room: PrefillRoom, post: Post, now_s: float) -> None:
        self._counters["bytes"] += post.pieces.size_bytes
        if post.write_try != room.write_try:
            self._counters["late_completions"] += 1
            return
        room.done_bytes += post.kv_bytes
        room.progress_at_s = now_s
        if room.state is not KVPoll.Transferring:
            return
        if room.written:
            self._rooms.succeed(room)
        elif now_s - room.reported_at_s >= PROGRESS_EVERY_S:
            self._rooms.report_progress(room, now_s)

    def _try_again(self, room: PrefillRoom, peer: DecodePeer, error: str, now_s: float) -> None:
        if room.write_try >= self.transfer_retries or not peer.answers:
            times = f" ({room.write_try + 1} times)" if room.write_try else ""
            self._rooms.fail(room, f"writing to the decode worker failed{times}: {error}")
            return
        room.begin_next_try()
        room.progress_at_s = now_s
        self._counters["retried"] += 1
        self._rooms.report_progress(room, now_s)


# ---- core

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
        takes: PeerWork = PeerWork.ANY,
    ) -> None:
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
            self.rooms, self.outbox, self.paths, self.peers, self.effects.counters, config.transfer_retries
        )
        self._config = config
        self._next_scan_s = 0.0
        offers = Offers(self.rooms, self.inbox, self.paths, takes=takes)
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
    def has_chunks(self) -> bool:
        """Pages wait for a layer or their turn; without the lock."""
        return any(room.chunks for room in self.rooms)

    @property
    def is_quiet(self) -> bool:
        return self.outbox.num_inflight == 0 and all(room.quiet for room in self.rooms)

    @property
    def rests(self) -> bool:
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
