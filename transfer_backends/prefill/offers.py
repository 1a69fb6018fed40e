"""Messages of decode workers about rooms: pages, recomputation, aborts. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from transfer_backends.contract import ABORTED_BY_DECODE, RecomputeRequest, Work
from transfer_backends.prefill.inbox import Inbox, Offer
from transfer_backends.prefill.paths import DecodePeer, Paths
from transfer_backends.prefill.rooms import PrefillRooms
from transfer_backends.rooms import KVPoll, PeerProtocolError, RoomKey
from transfer_backends.shards import I64
from transfer_backends.wire import Abort, Recompute, TransferInfo, unpack_ids


class Offers:
    """Handlers; each raises `PeerProtocolError`, changing nothing."""

    def __init__(self, rooms: PrefillRooms, inbox: Inbox, paths: Paths, *, computes: bool) -> None:
        self._rooms = rooms
        self._inbox = inbox
        self._paths = paths
        self._computes = computes

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
        if not self._computes:
            self._rooms.reject(peer, key, "this is a decode worker: it computes no prompts")
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
    )
    return RecomputeRequest(message.room, message.attempt, work)
