"""Offers for rooms that prefill has not opened, and reasons of ended rooms. Pure.

Peers fill these tables, so all are bounded.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from transfer_backends.contract import I64, Caps, Gate, KVArgs, Pieces, Progress, RecomputeRequest
from transfer_backends.prefill.paths import DecodePeer
from transfer_backends.shards import batches, plan_pieces
from transfer_backends.sides import RoomKey

MAX_PAGES = 1 << 22  # page ids in all offers
MAX_TOKENS = 1 << 22  # token ids in all requests for recomputation
MAX_IMAGE_BYTES = 1 << 30  # bytes of images in them: 40 of the largest messages
MAX_REASON_CHARS = 256  # an ended room's reason, perhaps a peer's text


@dataclass(frozen=True)
class Offer:
    """Destination at decode: metadata row, pages after `skip_pages`, items per pool (`tail`)."""

    peer: DecodePeer
    pages: I64
    metadata_row: int
    skip_pages: int = 0
    tail: tuple[I64, ...] = ()
    partial: bool = False


@dataclass(frozen=True)
class Tombstone:
    """End of a room; `by_peer`: before our request arrived, which has to fail."""

    reason: str
    by_peer: bool
    expires_at_s: float


class Inbox:
    def __init__(self, *, keep_s: float, max_offers: int, max_tombstones: int) -> None:
        self._keep_s = keep_s
        self._max_offers = max_offers
        self._max_tombstones = max_tombstones
        self._offers: OrderedDict[RoomKey, tuple[Offer, float]] = OrderedDict()
        self._num_pages = 0
        self._tombstones: OrderedDict[RoomKey, Tombstone] = OrderedDict()
        self._requests: list[RecomputeRequest] = []
        self._num_tokens = self._num_image_bytes = 0

    def __len__(self) -> int:
        return len(self._offers)

    def owner(self, key: RoomKey) -> str | None:
        entry = self._offers.get(key)
        return None if entry is None else entry[0].peer.incarnation

    def keep(self, key: RoomKey, offer: Offer, now_s: float) -> bool:
        full = len(self._offers) >= self._max_offers or self._num_pages + len(offer.pages) > MAX_PAGES
        if not full:
            self._offers[key] = (offer, now_s + self._keep_s)
            self._num_pages += len(offer.pages)
        return not full

    def keep_request(self, request: RecomputeRequest, offer: Offer, now_s: float) -> bool:
        """False when full."""
        work = request.work
        if self._num_tokens + len(work.tokens) > MAX_TOKENS:
            return False
        if self._num_image_bytes + len(work.images) > MAX_IMAGE_BYTES:
            return False
        if not self.keep((request.room, request.room_attempt), offer, now_s):
            return False
        self._requests.append(request)
        self._num_tokens += len(work.tokens)
        self._num_image_bytes += len(work.images)
        return True

    @property
    def num_recompute_requests(self) -> int:
        return len(self._requests)

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        """Rooms aborted since fail when opened."""
        taken, self._requests, self._num_tokens, self._num_image_bytes = self._requests, [], 0, 0
        return taken

    def take(self, key: RoomKey) -> Offer | None:
        entry = self._offers.pop(key, None)
        if entry is None:
            return None
        self._num_pages -= len(entry[0].pages)
        return entry[0]

    def take_all_of(self, peer: DecodePeer) -> list[RoomKey]:
        keys = [key for key, (offer, _) in self._offers.items() if offer.peer is peer]
        for key in keys:
            self.take(key)
        return keys

    def bury(self, key: RoomKey, reason: str, *, by_peer: bool, now_s: float) -> None:
        self._tombstones.pop(key, None)
        self._tombstones[key] = Tombstone(reason[:MAX_REASON_CHARS], by_peer, now_s + self._keep_s)
        while len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)

    def tombstone(self, key: RoomKey) -> Tombstone | None:
        return self._tombstones.get(key)

    def exhume(self, key: RoomKey) -> Tombstone | None:
        return self._tombstones.pop(key, None)

    def expire(self, now_s: float) -> list[tuple[RoomKey, Offer]]:
        expired = []
        while self._offers:
            key, (offer, expires_at_s) = next(iter(self._offers.items()))
            if now_s < expires_at_s:
                break
            self.take(key)
            expired.append((key, offer))
        while self._tombstones and next(iter(self._tombstones.values())).expires_at_s <= now_s:
            self._tombstones.popitem(last=False)
        return expired

    def check(self) -> None:
        counted = sum(len(offer.pages) for offer, _ in self._offers.values())
        assert counted == self._num_pages, "inbox: the count of page ids is off"


# ---- Plan of engine operations: source and destination bytes of a chunk. Pure.


@dataclass(frozen=True)
class Chunk:
    """Pages of a prompt from page `start`; they leave once `gate` opens.

    The last chunk has a metadata row, with bytes in `row` unless the engine writes it, and a
    `tail`.
    """

    src: I64
    start: int
    metadata_row: int | None
    gate: Gate | None = None
    row: bytes | None = None
    tail: tuple[I64, ...] = ()

    @property
    def last(self) -> bool:
        return self.metadata_row is not None

    def writes(self, skip_pages: int) -> bool:
        pages = len(self.src) > 0 and self.start + len(self.src) > skip_pages
        return pages or (self.last and self.row is None) or any(len(ids) for ids in self.tail)


@dataclass(eq=False)
class Post:
    """One engine operation; `kv_bytes` is 0 for the metadata row."""

    key: RoomKey
    incarnation: str
    pieces: Pieces
    kv_bytes: int
    write_try: int = 0


def num_groups(chunk: Chunk, args: KVArgs) -> int:
    return len(args.groups) if chunk.gate is not None and chunk.gate.by_layer else 1


def num_open(chunk: Chunk, progress: Progress, args: KVArgs) -> int:
    gate = chunk.gate
    if gate is None or progress.step > gate.step:
        return num_groups(chunk, args)
    if progress.step < gate.step:
        return 0
    return sum(group.end_layer <= args.written(progress.layers) for group in args.groups) if gate.by_layer else 1


def plan_ops(
    chunk: Chunk, offer: Offer, *, groups: tuple[int, int], args: KVArgs, caps: Caps
) -> list[tuple[Pieces, int]]:
    """(pieces, page bytes) of each operation; `groups`: of layers, from..until.

    Skips pages that decode has. Tail and metadata row follow, counting 0 page bytes.
    """
    path = offer.peer.path
    src = chunk.src[max(0, offer.skip_pages - chunk.start) :]
    first = max(0, chunk.start - offer.skip_pages)
    dst = offer.pages[first : first + len(src)]
    begin, until = 0, path.unit_bytes
    if groups != (0, num_groups(chunk, args)):
        begin = args.groups[groups[0] - 1].end_byte if groups[0] else 0
        until = args.groups[groups[1] - 1].end_byte if groups[1] < len(args.groups) else until
    plans = [
        batches(pieces, max_pieces=caps.max_post_pieces, max_bytes=caps.max_post_bytes)
        for shard in path.shards
        if (pieces := shard.plan(src, dst, begin=begin, end=until, max_piece_bytes=caps.max_piece_bytes)) is not None
    ]
    # interleaved: each pair of ranks has its own link
    parts = plans[0] if len(plans) == 1 else (part for turn in zip_longest(*plans) for part in turn if part is not None)
    planned = [(part, part.size_bytes) for part in parts]
    for beside in path.side_shards if chunk.tail else ():
        here, there = chunk.tail[beside.pool], offer.tail[beside.pool]
        pieces = beside.plan(here, there[: len(here)], max_piece_bytes=caps.max_piece_bytes)
        parts = batches(pieces, max_pieces=caps.max_post_pieces, max_bytes=caps.max_post_bytes)
        planned += [(part, 0) for part in parts]
    if chunk.metadata_row is not None and chunk.row is None:
        rows = np.array([chunk.metadata_row], np.int64), np.array([offer.metadata_row], np.int64)
        aux = path.memory.aux
        planned.append((plan_pieces(*rows, src=args.aux, dst=aux, max_piece_bytes=args.aux.item_bytes), 0))
    return planned
