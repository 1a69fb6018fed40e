"""Prefill's side of all transfers: which room waits for whom, what is posted next, when source pages are free. Pure.

Told of local calls, messages, results of operations and time; answers by states (`state`, `released`, ...) and by
`effects`: messages to send and commands for the engine. Runs the same under threads and in a simulation. Knows no sockets,
threads, clocks or engines.

    sender opened --TransferInfo--> WaitingForInput --first send--> Transferring --all operations done--> Success

A failed write is no failed transfer yet: while the peer lives, all of it is written once more to the same pages, after the
fence has shown that nothing of the last try can still land (`transfer_retries`). Operations and messages carry the
number of their try; what is told of an earlier one counts for nothing (docs/design/handover.md, "Write tries").

Rules of an abort (facts/transfer.md section 5): fail first, so that nothing new is posted; tell decode at once; say
`Drained` when the last operation is final, and after a failed one only when the fence has held.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transfer_backends.contract import (
    ABORTED_BY_DECODE,
    NOTHING_YET,
    Caps,
    Gate,
    KVArgs,
    Progress,
    RecomputeRequest,
    TransferConfig,
    Work,
)
from transfer_backends.kvpoll import (
    FINAL,
    IllegalTransition,
    KVPoll,
    PeerProtocolError,
    RoomKey,
    TransferMachine,
)
from transfer_backends.liveness import ProcessMark
from transfer_backends.prefill.inbox import Inbox, Offer
from transfer_backends.prefill.peers import Effects, Link, Peer, PeerTable, Phase
from transfer_backends.prefill.room import Chunk, Post, Room, check_send, num_groups, num_open, plan_posts
from transfer_backends.wire import (
    Abort,
    Bye,
    Drained,
    MalformedFrame,
    Message,
    Ping,
    Pong,
    Recompute,
    Register,
    Status,
    TransferInfo,
    clip,
    layout_of,
    unpack_ids,
)

PROGRESS_EVERY_S = 0.25  # each such word wakes both sides' threads beside a step that computes
TOGETHER_BYTES = (
    4 << 20
)  # posted in one go: a millisecond's copying, and to ask the core once more may cost half of that
SCAN_S_A_ROOM = 50e-6  # deadlines of many rooms are looked at less often, so that ticks stay cheap


class PrefillRooms:
    def __init__(
        self, *, incarnation: str, mark: ProcessMark, kv_args: KVArgs, caps: Caps, config: TransferConfig
    ) -> None:
        layout = layout_of(kv_args, backend=caps.name)
        items = (kv_args.kv.item_bytes, kv_args.aux.item_bytes)
        self.peers = PeerTable(incarnation=incarnation, mark=mark, layout=layout, items=items, config=config)
        self.machine = TransferMachine()
        self.num_inflight = 0  # pieces posted and not final
        self._num_inflight_bytes = 0
        self.window_full = False  # what is next has to wait until something ends
        self._args = kv_args
        self._caps = caps
        self._config = config
        self._rooms: dict[RoomKey, Room] = {}
        self._next_scan_s = 0.0
        self._ready: deque[RoomKey] = deque()  # rooms with something to post, in turn
        self._progress = NOTHING_YET
        self._gated: dict[RoomKey, None] = {}  # rooms that wait for a step to write something, in order
        self._inbox = Inbox(config)
        self._handlers: dict[type, Callable[[Peer, Any, float], None]] = {
            TransferInfo: self._on_transfer_info,
            Recompute: self._on_recompute,
            Abort: self._on_abort,
            Ping: self._on_ping,
            Pong: lambda peer, message, now_s: None,
            Bye: self._on_bye,
        }

    @property
    def effects(self) -> Effects:
        return self.peers.effects

    # ---- the role's calls

    def open(self, room: int, room_attempt: int, now_s: float) -> RoomKey:
        key = (room, room_attempt)
        self.machine.open(key)
        rec = Room(key, opened_at_s=now_s)
        self._rooms[key] = rec
        offer, tombstone = self._inbox.take(key), self._inbox.exhume(key)
        if offer is not None:
            self._accept(rec, offer)
        elif tombstone is not None and tombstone.by_peer:
            self._fail(rec, tombstone.reason)
        return key

    @property
    def num_recompute_requests(self) -> int:
        return self._inbox.num_recompute_requests

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        """What decode workers want computed; the role opens each one's room."""
        return self._inbox.take_recompute_requests()

    def num_pages(self, key: RoomKey) -> int | None:
        offer = self._rooms[key].offer
        return None if offer is None else len(offer.pages)

    def skip_pages(self, key: RoomKey) -> int:
        offer = self._rooms[key].offer
        return 0 if offer is None else offer.skip_pages

    def send(
        self,
        key: RoomKey,
        src_pages: Sequence[int],
        *,
        start: int,
        last: bool,
        metadata_row: int | None,
        now_s: float,
        gate: Gate | None = None,
    ) -> None:
        """Raises ValueError for our own mistakes; a count that differs from decode's fails the room."""
        rec = self._rooms[key]
        state = self.machine.state(key)
        if state is KVPoll.Failed:
            return
        if state in (KVPoll.Bootstrapping, KVPoll.Success) or rec.all_queued:
            raise IllegalTransition(f"room {key}: send in {state.name}{' after the last chunk' * rec.all_queued}")
        src = np.asarray(src_pages, dtype=np.int64)
        check_send(rec, src, args=self._args, start=start, last=last, metadata_row=metadata_row, gate=gate)
        chunk = Chunk(src, start, metadata_row if last else None, gate)
        rec.given.append(chunk)
        if not rec.held:
            rec.chunks.append(chunk)
        rec.queued_pages = start + len(src)
        rec.all_queued = last
        self._go_on(rec, now_s)

    def _go_on(self, rec: Room, now_s: float) -> None:
        """There are more pages."""
        if self.machine.state(rec.key) is KVPoll.WaitingForInput:
            self.machine.move(rec.key, KVPoll.Transferring)
            # Of what is still to be computed decode hears when it lands: its patience is for that. Of the last chunk, soon.
            if rec.all_queued:
                rec.told_at_s = now_s
            elif rec.given[-1].gate is None:
                self._tell_progress(rec, now_s)
        if rec.misfit is not None:
            self._fail(rec, rec.misfit)
            return
        rec.progress_at_s = now_s
        self._ready.append(rec.key)

    def abort(self, key: RoomKey, reason: str) -> None:
        rec = self._rooms[key]
        if self.machine.state(key) not in FINAL:
            self._fail(rec, reason)

    def failure(self, key: RoomKey) -> str | None:
        return self._rooms[key].reason

    def released(self, key: RoomKey) -> bool:
        return self.machine.state(key) in FINAL and self._rooms[key].quiet

    def close(self, key: RoomKey, now_s: float) -> None:
        if not self.released(key):
            raise RuntimeError(f"room {key}: closed in {self.machine.state(key).name} before its pages were released")
        self.machine.forget(key)
        rec = self._rooms.pop(key)
        self._inbox.bury(key, rec.reason or "the transfer has ended", by_peer=False, now_s=now_s)

    @property
    def is_quiet(self) -> bool:
        """Nothing that was posted can still read or write."""
        return self.num_inflight == 0 and all(rec.quiet for rec in self._rooms.values())

    def quiet_peers(self) -> list[Peer]:
        """Those into whose memory nothing can still write: only they may be told goodbye."""
        busy = {rec.offer.incarnation for rec in self._rooms.values() if rec.offer is not None and not rec.quiet}
        peers = [self.peers.by_link(link) for link in self.peers.links()]
        return [peer for peer in peers if peer is not None and peer.incarnation not in busy]

    # ---- the engine driver's calls

    @property
    def wants_driver(self) -> bool:
        return bool(self.effects.commands or self._ready)

    def next_posts(self, now_s: float) -> list[Post]:
        """What to post in one go: one operation, and what follows it while all of it is small. So the metadata row leaves

        with the last pages of a short prompt, and both have ended when the core next hears of them.
        """
        posts: list[Post] = []
        size_bytes = 0
        while size_bytes < TOGETHER_BYTES and (post := self.next_post(now_s)) is not None:
            posts.append(post)
            size_bytes += post.pieces.size_bytes
        return posts

    def next_post(self, now_s: float) -> Post | None:
        """Something to post now, rooms in turn, within the window; counts as posted."""
        self.window_full = False
        for _ in range(len(self._ready)):
            key = self._ready.popleft()
            rec = self._rooms.get(key)
            post = None if rec is None else self._head(rec)
            if rec is None or post is None:
                continue
            peer = self.peers.get(post.incarnation)
            if peer is None or peer.phase is not Phase.LIVE or peer.settle_at_s is not None:
                self._ready.append(key)
                continue
            if not self._fits(post):
                self._ready.appendleft(key)
                self.window_full = True
                return None
            rec.posts.popleft()
            self._count_posted(rec, post, peer, now_s)
            self._ready.append(key)
            return post
        return None

    def _fits(self, post: Post) -> bool:
        pieces = self.num_inflight + len(post.pieces)
        size = self._num_inflight_bytes + post.pieces.size_bytes
        fits = pieces <= self._caps.max_inflight and size <= self._caps.max_inflight_bytes
        return fits or self.num_inflight == 0

    def _head(self, rec: Room) -> Post | None:
        while not rec.posts and rec.chunks:
            chunk = rec.chunks[0]
            until = num_open(chunk, self._progress, self._args)
            if until <= rec.left_groups:
                self._gated[rec.key] = None
                return None
            peer = self.peers.get(rec.offer.incarnation) if rec.offer else None
            assert rec.offer is not None and peer is not None, "a room's peer outlives its queue"
            rec.posts.extend(plan_posts(chunk, rec, peer, until=until, args=self._args, caps=self._caps))
            rec.left_groups = until
            if until == num_groups(chunk, self._args):
                rec.chunks.popleft()
                rec.left_groups = 0
        return rec.posts[0] if rec.posts else None

    def on_progress(self, progress: Progress, now_s: float) -> None:
        """The engine has written more: who waited for it may post."""
        assert progress >= self._progress, "a stream does not go back"
        if progress == self._progress:
            return
        self._progress = progress
        for key in self._gated:
            if (rec := self._rooms.get(key)) is not None:
                rec.progress_at_s = now_s
                self._ready.append(key)
        self._gated.clear()

    def _waits_for_compute(self, rec: Room) -> bool:
        """Nothing to post, and that is nobody's fault."""
        gated = rec.chunks and num_open(rec.chunks[0], self._progress, self._args) <= rec.left_groups
        return bool(gated) and not (rec.posts or rec.num_ops)

    def _count_posted(self, rec: Room, post: Post, peer: Peer, now_s: float) -> None:
        rec.num_ops += 1
        self.num_inflight += len(post.pieces)
        self._num_inflight_bytes += post.pieces.size_bytes
        self.peers.on_op_posted(peer)
        self.effects.counters["posts"] += 1
        if rec.num_ops == 1:
            rec.progress_at_s = now_s

    def on_op_final(self, post: Post, *, ok: bool, error: str, now_s: float) -> None:
        """The operation will never write again (`ok`: its bytes are there)."""
        rec = self._rooms[post.key]
        peer = self.peers.get(post.incarnation)
        assert peer is not None, "a peer outlives its operations"
        rec.num_ops -= 1
        self.num_inflight -= len(post.pieces)
        self._num_inflight_bytes -= post.pieces.size_bytes
        rec.dirty |= not ok
        if self.machine.state(post.key) in FINAL:  # its pages may be free now; else there is nothing new to see
            self.machine.touch()
        self.peers.on_op_final(peer, ok=ok)
        if ok:
            self._on_written(rec, post, now_s)
        else:
            self.effects.counters["failed_posts"] += 1
            if self.machine.state(rec.key) not in FINAL and not rec.held:
                self._try_again(rec, peer, error, now_s)
        self._tell_drained(rec)
        self.peers.retire(peer)

    def _try_again(self, rec: Room, peer: Peer, error: str, now_s: float) -> None:
        """Once more, when the peer lives and nothing of this try can still write (`_settle`); else it has failed.

        Decode is told at once which try counts from now on. Its pages stay exposed.
        """
        if rec.retry >= self._config.transfer_retries or peer.lost or peer.pulse.silent:
            times = f" ({rec.retry + 1} times)" if rec.retry else ""
            self._fail(rec, f"writing to the decode worker failed{times}: {error}")
            return
        rec.hold()
        rec.done_bytes = 0
        rec.progress_at_s = now_s
        self.effects.counters["retried"] += 1
        self._tell_progress(rec, now_s)

    def _on_written(self, rec: Room, post: Post, now_s: float) -> None:
        self.effects.counters["bytes"] += post.pieces.size_bytes
        if post.retry != rec.retry:
            self.effects.counters["late_completions"] += 1
            return
        rec.done_bytes += post.kv_bytes
        rec.progress_at_s = now_s
        if self.machine.state(rec.key) is not KVPoll.Transferring:
            return
        if rec.all_queued and rec.num_ops == 0 and not rec.posts and not rec.chunks:
            self.machine.move(rec.key, KVPoll.Success)
            self.effects.counters["succeeded"] += 1
            self._tell(rec, KVPoll.Success)
        elif now_s - rec.told_at_s >= PROGRESS_EVERY_S:
            self._tell_progress(rec, now_s)

    def on_fenced(self, incarnation: str, *, ok: bool, now_s: float) -> None:
        if self.peers.on_fenced(incarnation, ok=ok, settle_s=self._caps.settle_s, now_s=now_s):
            self._settle(incarnation)

    def _settle(self, incarnation: str) -> None:
        for rec in self._rooms_of(incarnation):
            if rec.num_ops == 0:
                rec.dirty = False
                self.machine.touch()
                self._tell_drained(rec)
                if rec.held:
                    rec.begin_anew()
                    self._ready.append(rec.key)
        peer = self.peers.get(incarnation)
        if peer is not None:
            self.peers.retire(peer)

    # ---- the control plane's calls

    def on_message(self, link: Link, message: Message, now_s: float) -> None:
        """Raises `PeerProtocolError` (nothing changed) for what the peer may not say now."""
        if isinstance(message, Register):
            again = self.peers.register(link, message, now_s)
            if again is not None:
                self._fail_rooms_of(again.incarnation, "the decode worker connected anew")
            return
        peer = self.peers.by_link(link)
        if peer is None or message.dst != self.peers.incarnation or message.src != peer.incarnation:
            if not isinstance(message, Bye):
                self.peers.refuse(link, message.src, "not registered with this prefill worker", stale=True)
            return
        if not peer.registered:
            raise PeerProtocolError(f"{type(message).__name__} before the registration was answered")
        peer.pulse.heard()
        handler = self._handlers.get(type(message))
        if handler is None:
            raise PeerProtocolError(f"{type(message).__name__} is not for a prefill worker")
        handler(peer, message, now_s)

    def on_link_closed(
        self, link: Link, now_s: float, *, reason: str = "the decode worker's connection was lost"
    ) -> None:
        peer = self.peers.lose(link)
        if peer is not None:
            self._fail_rooms_of(peer.incarnation, reason)
            for key in self._inbox.take_all_of(peer.incarnation):
                self._inbox.bury(key, reason, by_peer=True, now_s=now_s)
            self.peers.retire(peer)

    def _on_bye(self, peer: Peer, message: Bye, now_s: float) -> None:
        self.on_link_closed(peer.link, now_s, reason="the decode worker shut down")

    def _on_ping(self, peer: Peer, message: Ping, now_s: float) -> None:
        self.peers.say(peer, Pong(self.peers.incarnation, peer.incarnation, message.seq))

    def _on_transfer_info(self, peer: Peer, message: TransferInfo, now_s: float) -> None:
        key = (message.room, message.attempt)
        try:
            offer = self._read_offer(peer, message)
        except (MalformedFrame, ValueError) as error:
            self._reject(peer, key, str(error))
            raise PeerProtocolError(str(error)) from None
        rec = self._rooms.get(key)
        tombstone = self._inbox.tombstone(key)
        if rec is None and tombstone is None:
            self._keep_orphan(peer, key, offer, now_s)
        elif rec is None:
            assert tombstone is not None
            self._reject(peer, key, f"prefill: {tombstone.reason}")
        elif self.machine.state(key) is KVPoll.Bootstrapping:
            self._accept(rec, offer)
        elif rec.offer is None:
            self._reject(peer, key, f"prefill: {rec.reason}")
        elif rec.offer.incarnation == peer.incarnation:
            raise PeerProtocolError(f"room {key}: a second transfer info")
        else:
            self._reject(peer, key, f"bootstrap_room {message.room} is in use by another decode worker")

    def _on_recompute(self, peer: Peer, message: Recompute, now_s: float) -> None:
        key = (message.room, message.attempt)
        try:
            offer, asked = self._read_offer(peer, message), _read_asked(message)
        except (MalformedFrame, ValueError) as error:
            self._reject(peer, key, str(error))
            raise PeerProtocolError(str(error)) from None
        known = key in self._rooms or self._inbox.tombstone(key) is not None or self._inbox.owner(key) is not None
        if known:
            self._reject(peer, key, f"bootstrap_room {message.room}: attempt {message.attempt} was there already")
        elif self._inbox.ask(asked, offer, now_s):
            self.machine.touch()
        else:
            self._reject(peer, key, "prefill was asked to compute too much at once")

    def _read_offer(self, peer: Peer, message: TransferInfo | Recompute) -> Offer:
        pages = unpack_ids(message.pages)
        if len(pages) and not (pages.min() >= 0 and pages.max() < peer.kv.num_items):
            raise ValueError(f"room {message.room}: a page is outside decode's pool of {peer.kv.num_items}")
        if len(np.unique(pages)) != len(pages):
            raise ValueError(f"room {message.room}: a page is given twice")
        if message.aux_idx >= peer.aux.num_items:
            raise ValueError(
                f"room {message.room}: metadata_row {message.aux_idx} is outside {peer.aux.num_items} rows"
            )
        return Offer(peer.incarnation, pages, message.aux_idx, message.skip_pages)

    def _accept(self, rec: Room, offer: Offer) -> None:
        rec.offer = offer
        self.machine.move(rec.key, KVPoll.WaitingForInput)

    def _keep_orphan(self, peer: Peer, key: RoomKey, offer: Offer, now_s: float) -> None:
        owner = self._inbox.owner(key)
        if owner == peer.incarnation:
            raise PeerProtocolError(f"room {key}: a second transfer info")
        if owner is not None:
            self._reject(peer, key, f"bootstrap_room {key[0]} is in use by another decode worker")
        elif not self._inbox.keep(key, offer, now_s):
            self._reject(peer, key, f"prefill keeps {len(self._inbox)} transfers whose request has not come: no more")

    def _on_abort(self, peer: Peer, message: Abort, now_s: float) -> None:
        key = (message.room, message.attempt)
        rec = self._rooms.get(key)
        if rec is None:
            if self._inbox.owner(key) in (None, peer.incarnation):
                self._inbox.take(key)
                if self._inbox.tombstone(key) is None:
                    self._inbox.bury(key, f"{ABORTED_BY_DECODE}: {message.reason}", by_peer=True, now_s=now_s)
            self._say_drained(peer, key, message.retry)
            return
        if rec.offer is not None and rec.offer.incarnation != peer.incarnation:
            self._say_drained(peer, key, message.retry)  # nothing of this room goes to that peer
            raise PeerProtocolError(f"room {key}: aborted by a decode worker it does not belong to")
        if self.machine.state(key) not in FINAL:
            self._fail(rec, f"{ABORTED_BY_DECODE}: {message.reason}", tell=False)
        if rec.quiet:
            rec.undrained = False
            self._say_drained(peer, key, rec.retry)
        else:
            rec.undrained = True

    # ---- time

    def tick(self, now_s: float) -> None:
        silent, settled = self.peers.tick(now_s)
        for peer in silent:
            self._fail_rooms_of(peer.incarnation, "the decode worker does not answer")
        for peer in settled:
            self._settle(peer.incarnation)
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + SCAN_S_A_ROOM * len(self._rooms)
            for rec in list(self._rooms.values()):
                self._check_deadline(rec, now_s)
        self._expire(now_s)

    def _check_deadline(self, rec: Room, now_s: float) -> None:
        state = self.machine.state(rec.key)
        if state is KVPoll.Bootstrapping and now_s - rec.opened_at_s >= self._config.bootstrap_timeout_s:
            timeout_s = self._config.bootstrap_timeout_s
            self._fail(rec, f"no decode worker gave its pages within {timeout_s:g} s (bootstrap timeout)")
        busy = state is KVPoll.Transferring and (rec.num_ops or rec.posts or rec.chunks or rec.held)
        if busy and not self._waits_for_compute(rec) and now_s - rec.progress_at_s >= self._config.transfer_timeout_s:
            self._fail(rec, f"the transfer made no progress for {self._config.transfer_timeout_s:g} s")

    def _expire(self, now_s: float) -> None:
        for key, offer in self._inbox.expire(now_s):
            self.effects.counters["orphans_expired"] += 1
            reason = f"no request for it came to prefill within {self._config.bootstrap_timeout_s:g} s"
            self._inbox.bury(key, reason, by_peer=True, now_s=now_s)
            peer = self.peers.get(offer.incarnation)
            if peer is not None:
                self._reject(peer, key, reason)

    # ---- inside

    def _fail(self, rec: Room, reason: str, *, tell: bool = True) -> None:
        self.machine.move(rec.key, KVPoll.Failed)
        self.effects.counters["failed"] += 1
        rec.reason = reason
        rec.held = False
        rec.given.clear()
        rec.clear()
        rec.undrained = rec.offer is not None
        if tell:
            self._tell(rec, KVPoll.Failed)
            self._tell_drained(rec)

    def _rooms_of(self, incarnation: str) -> list[Room]:
        return [rec for rec in self._rooms.values() if rec.offer is not None and rec.offer.incarnation == incarnation]

    def _fail_rooms_of(self, incarnation: str, reason: str) -> None:
        for rec in self._rooms_of(incarnation):
            if self.machine.state(rec.key) not in FINAL:
                self._fail(rec, reason)

    def _tell(self, rec: Room, state: KVPoll) -> None:
        peer = self.peers.get(rec.offer.incarnation) if rec.offer else None
        if peer is not None:
            reason = f"prefill: {rec.reason}" if rec.reason else ""
            done_pages = rec.done_bytes // self._args.kv.item_bytes
            self._say_status(peer, rec.key, state, done_pages, reason, rec.retry)

    def _tell_progress(self, rec: Room, now_s: float) -> None:
        rec.told_at_s = now_s
        self._tell(rec, KVPoll.Transferring)

    def _tell_drained(self, rec: Room) -> None:
        peer = self.peers.get(rec.offer.incarnation) if rec.offer else None
        if rec.undrained and rec.quiet and peer is not None:
            rec.undrained = False
            self._say_drained(peer, rec.key, rec.retry)

    def _reject(self, peer: Peer, key: RoomKey, reason: str) -> None:
        """Of a room that was never written to."""
        self._say_status(peer, key, KVPoll.Failed, 0, reason, 0)
        self._say_drained(peer, key, 0)

    def _say_status(self, peer: Peer, key: RoomKey, state: KVPoll, num_pages: int, reason: str, retry: int) -> None:
        me = self.peers.incarnation
        self.peers.say(peer, Status(me, peer.incarnation, *key, int(state), num_pages, clip(reason), retry))

    def _say_drained(self, peer: Peer, key: RoomKey, retry: int) -> None:
        self.peers.say(peer, Drained(self.peers.incarnation, peer.incarnation, *key, retry))

    def check(self) -> list[str]:
        """What is inconsistent; empty when all is well."""
        problems = self.peers.check() + self._inbox.check()
        if list(self.machine) != list(self._rooms):
            problems.append("rooms and states differ")
        for rec in self._rooms.values():
            if rec.num_ops < 0 or (self.machine.state(rec.key) is KVPoll.Success and not rec.quiet):
                problems.append(f"room {rec.key}: {rec.num_ops} operations in {self.machine.state(rec.key).name}")
            if rec.left_groups and not rec.chunks:
                problems.append(f"room {rec.key}: {rec.left_groups} groups of layers of nothing")
        if self.num_inflight < 0 or (self.num_inflight and not any(rec.num_ops for rec in self._rooms.values())):
            problems.append(f"{self.num_inflight} pieces in flight without a room")
        return problems


def _read_asked(message: Recompute) -> RecomputeRequest:
    tokens = unpack_ids(message.tokens)
    if not len(tokens) or tokens.min() < 0:
        raise ValueError(f"room {message.room}: {len(tokens)} tokens to compute, or a negative one")
    work = Work(tokens=tokens.tolist(), skip_pages=message.skip_pages, priority=message.priority, share=message.share)
    return RecomputeRequest(message.room, message.attempt, work)
