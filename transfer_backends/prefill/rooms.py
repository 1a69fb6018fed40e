"""Prefill's transfers: the role's calls, transitions, reports to decode. Pure.

  sender opened --TransferInfo--> WaitingForInput
      --first send--> Transferring --all operations done--> Success

`Drained` follows the last operation, after a failure a fence.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from operator import le

from transfer_backends.contract import I64, NOTHING_YET, Caps, KVArgs, Progress
from transfer_backends.prefill.inbox import Chunk, Inbox, Offer, Post, num_groups, num_open, plan_ops
from transfer_backends.prefill.paths import DecodePeer, Path, Paths
from transfer_backends.sides import IllegalTransition, KVPoll, PeerTable, Room, RoomKey, RoomTable
from transfer_backends.wire import Status, clip

# ---- State of one transfer on prefill. Pure.


@dataclass(eq=False)
class PrefillRoom(Room):
    """Destination and progress of a transfer.

    - chunks: queued, not planned; all_chunks: for a retry; posts: planned, not posted
    - left_groups: planned layer groups of the first chunk
    - num_ops: posted, not final; done_bytes: of pages, in this try
    - awaits_fence: the try starts once the last one cannot write
    - dirty: failed without a fence since; owes_drained: decode waits for `Drained`
    """

    opened_at_s: float
    offer: Offer | None = None
    chunks: deque[Chunk] = field(default_factory=deque)
    all_chunks: list[Chunk] = field(default_factory=list)
    posts: deque[Post] = field(default_factory=deque)
    queued_pages: int = 0
    left_groups: int = 0
    all_queued: bool = False
    row: bytes = b""
    tail: tuple[I64, ...] = ()
    done_bytes: int = 0
    num_ops: int = 0
    dirty: bool = False
    write_try: int = 0
    awaits_fence: bool = False
    owes_drained: bool = False
    reported_at_s: float = -math.inf

    @property
    def peer(self) -> DecodePeer | None:
        return None if self.offer is None else self.offer.peer

    @property
    def num_pages(self) -> int | None:
        return None if self.offer is None else len(self.offer.pages)

    @property
    def skip_pages(self) -> int:
        return 0 if self.offer is None else self.offer.skip_pages

    @property
    def quiet(self) -> bool:
        """No operation reads our pages or writes decode's."""
        return self.num_ops == 0 and not self.dirty

    @property
    def released(self) -> bool:
        return self.final and self.quiet

    @property
    def written(self) -> bool:
        posted = self.all_queued and not self.posts and not self.chunks and not self.awaits_fence
        return posted and self.num_ops == 0

    @property
    def misfit(self) -> str | None:
        assert self.offer is not None
        needed, given = self.queued_pages - self.offer.skip_pages, len(self.offer.pages)
        enough = needed <= given if self.offer.partial or not self.all_queued else needed == given
        if enough and (not self.all_queued or self._fits_extra(self.offer)):
            return None
        if enough:
            return f"decode gave {_counts(self.offer.tail)} items beside pages, prefill has {_counts(self.tail)}"
        word = "at least " * (not self.all_queued)
        return f"decode gave {given} pages, prefill has {word}{needed}: the two prompts differ"

    def _fits_extra(self, offer: Offer) -> bool:
        mine, given = _counts(self.tail), _counts(offer.tail)
        return all(map(le, mine, given)) if offer.partial else mine == given

    def queue(self, chunk: Chunk) -> None:
        if chunk.writes(self.skip_pages):
            self.all_chunks.append(chunk)
            if not self.awaits_fence:
                self.chunks.append(chunk)
        self.queued_pages = chunk.start + len(chunk.src)
        self.all_queued, self.row, self.tail = chunk.last, chunk.row or b"", chunk.tail

    def begin_next_try(self) -> None:
        """Post nothing until the fence, then everything."""
        self.write_try += 1
        self.awaits_fence = True
        self.done_bytes = 0
        self.clear()

    def start_over(self) -> None:
        assert self.awaits_fence and self.quiet
        self.awaits_fence = False
        self.chunks.extend(self.all_chunks)

    def end(self) -> None:
        self.awaits_fence = False
        self.all_chunks.clear()
        self.clear()

    def clear(self) -> None:
        self.chunks.clear()
        self.posts.clear()
        self.left_groups = 0

    def check(self) -> None:
        assert self.chunks or not self.left_groups, f"room {self.key}: {self.left_groups} groups of layers of nothing"
        assert self.num_ops >= 0, f"room {self.key}: {self.num_ops} operations"
        assert self.quiet or self.state is not KVPoll.Success, f"room {self.key}: operations in Success"
        assert not (self.awaits_fence and self.done_bytes), (
            f"room {self.key}: bytes of try {self.write_try}, which begins later"
        )


def _counts(tail: tuple[I64, ...]) -> list[int]:
    return [len(ids) for ids in tail]


def check_chunk(room: PrefillRoom, chunk: Chunk, args: KVArgs) -> None:
    """Raise ValueError for our own mistakes."""
    src, gate, row = chunk.src, chunk.gate, chunk.metadata_row
    if row is not None and gate is not None:
        raise ValueError(f"room {room.key}: the last chunk has a gate, its metadata row would vouch for pages to come")
    if gate is not None and gate.by_layer and not args.groups:
        raise ValueError(f"room {room.key}: pages are to leave by layers, and nothing says where layers end")
    if chunk.start != room.queued_pages:
        raise ValueError(f"room {room.key}: start {chunk.start} leaves a gap (next is {room.queued_pages})")
    if len(chunk.tail) != (len(args.pools) if chunk.last else 0):
        raise ValueError(
            f"room {room.key}: items of {len(chunk.tail)} pools, the last chunk has {len(args.pools)}, others none"
        )
    args.check_ids(room.key, src, row, chunk.tail)


# ---- Operations to post next: rooms round robin, chunks as gates open, in the window. Pure.

TOGETHER_BYTES = 4 << 20  # per call: a millisecond of copying; another iteration may cost half of that


class Outbox:
    def __init__(self, peers: PeerTable[DecodePeer], *, args: KVArgs, caps: Caps) -> None:
        self.num_inflight = 0  # pieces posted and not final
        self.window_full = False  # the next post waits for one to end
        self._num_inflight_bytes = 0
        self._peers = peers
        self._counters = peers.effects.counters
        self._args = args
        self._caps = caps
        self._ready: deque[PrefillRoom] = deque()  # rooms with something to post, round robin
        self._progress = NOTHING_YET
        self._gated: dict[RoomKey, PrefillRoom] = {}  # rooms that wait for a step, in order

    @property
    def has_work(self) -> bool:
        return bool(self._ready)

    def add(self, room: PrefillRoom) -> None:
        self._ready.append(room)

    def next_posts(self, now_s: float) -> list[Post]:
        """Take about `TOGETHER_BYTES`: a short prompt's metadata row leaves with its pages."""
        posts: list[Post] = []
        size_bytes = 0
        while size_bytes < TOGETHER_BYTES and (post := self.next_post(now_s)) is not None:
            posts.append(post)
            size_bytes += post.pieces.size_bytes
        return posts

    def next_post(self, now_s: float) -> Post | None:
        """Take one operation that fits into the window."""
        self.window_full = False
        for _ in range(len(self._ready)):
            room = self._ready.popleft()
            post = self._head(room)
            if post is None:
                continue
            assert room.peer is not None
            if not (room.peer.path.open and room.peer.answers):
                self._ready.append(room)
                continue
            if not self._fits(post):
                self._ready.appendleft(room)
                self.window_full = True
                return None
            room.posts.popleft()
            self._count_posted(room, post, room.peer.path, now_s)
            self._ready.append(room)
            return post
        return None

    def on_progress(self, progress: Progress, now_s: float) -> None:
        assert progress >= self._progress, "a stream does not go back"
        if progress == self._progress:
            return
        self._progress = progress
        for room in self._gated.values():
            room.progress_at_s = now_s
            self._ready.append(room)
        self._gated.clear()

    def on_op_final(self, room: PrefillRoom, post: Post) -> None:
        room.num_ops -= 1
        self.num_inflight -= len(post.pieces)
        self._num_inflight_bytes -= post.pieces.size_bytes

    def waits_for_compute(self, room: PrefillRoom) -> bool:
        """Only a step of the engine can release the room."""
        gated = room.chunks and self._num_open(room) <= room.left_groups
        return bool(gated) and not (room.posts or room.num_ops)

    def _head(self, room: PrefillRoom) -> Post | None:
        while not room.posts and room.chunks:
            chunk = room.chunks[0]
            until = self._num_open(room)
            if until <= room.left_groups:
                self._gated[room.key] = room
                return None
            self._plan(room, until)
            room.left_groups = until
            if until == num_groups(chunk, self._args):
                room.chunks.popleft()
                room.left_groups = 0
        return room.posts[0] if room.posts else None

    def _num_open(self, room: PrefillRoom) -> int:
        """Open layer groups; with several ranks only the step's end proves the last layer."""
        if room.all_queued and len(self._args.ranks) > 1:
            return num_groups(room.chunks[0], self._args)
        return num_open(room.chunks[0], self._progress, self._args)

    def _plan(self, room: PrefillRoom, until: int) -> None:
        assert room.offer is not None
        groups = (room.left_groups, until)
        for pieces, kv_bytes in plan_ops(room.chunks[0], room.offer, groups=groups, args=self._args, caps=self._caps):
            room.posts.append(Post(room.key, room.offer.peer.incarnation, pieces, kv_bytes, room.write_try))

    def _fits(self, post: Post) -> bool:
        """Ignore silent and lost peers: their operations may take minutes to end."""
        if self._have_room(self.num_inflight, self._num_inflight_bytes, post):
            return True
        paths = [peer.path for peer in self._peers if peer.answers]
        return self._have_room(sum(path.num_pieces for path in paths), sum(path.num_bytes for path in paths), post)

    def _have_room(self, num_pieces: int, num_bytes: int, post: Post) -> bool:
        pieces, size = num_pieces + len(post.pieces), num_bytes + post.pieces.size_bytes
        return (pieces <= self._caps.max_inflight and size <= self._caps.max_inflight_bytes) or num_pieces == 0

    def _count_posted(self, room: PrefillRoom, post: Post, path: Path, now_s: float) -> None:
        room.num_ops += 1
        path.on_posted(post.pieces, now_s)
        self.num_inflight += len(post.pieces)
        self._num_inflight_bytes += post.pieces.size_bytes
        self._counters["posts"] += 1
        if post.pieces.src_rank:
            self._counters["posts_of_followers"] += 1
        if room.num_ops == 1:
            room.progress_at_s = now_s


# ---- rooms


class PrefillRooms(RoomTable[PrefillRoom]):
    def __init__(
        self, peers: PeerTable[DecodePeer], paths: Paths, inbox: Inbox, outbox: Outbox, *, args: KVArgs
    ) -> None:
        super().__init__()
        self._peers = peers
        self._counters = peers.effects.counters
        self._paths = paths
        self._inbox = inbox
        self._outbox = outbox
        self._args = args

    def of(self, peer: DecodePeer) -> list[PrefillRoom]:
        return [room for room in self if room.peer is peer]

    # ---- the role's calls

    def open(self, room: int, room_attempt: int, now_s: float) -> PrefillRoom:
        opened = PrefillRoom((room, room_attempt), opened_at_s=now_s)
        self.add(opened)
        offer, tombstone = self._inbox.take(opened.key), self._inbox.exhume(opened.key)
        if offer is not None:
            self.accept(opened, offer)
        elif tombstone is not None and tombstone.by_peer:
            self.fail(opened, tombstone.reason)
        return opened

    def send(self, room: PrefillRoom, chunk: Chunk, now_s: float) -> None:
        """Raises ValueError for our own mistakes; a page count unlike decode's fails the room."""
        state = room.state
        if state is KVPoll.Failed:
            return
        if state in (KVPoll.Bootstrapping, KVPoll.Success) or room.all_queued:
            raise IllegalTransition(f"room {room.key}: send in {state.name}{' after the last chunk' * room.all_queued}")
        check_chunk(room, chunk, self._args)
        room.queue(chunk)
        if state is KVPoll.WaitingForInput:
            self.move(room, KVPoll.Transferring)
            # Decode's timeout runs from here, or from the landing of pages still to be computed.
            if chunk.last:
                room.reported_at_s = now_s
            elif chunk.gate is None:
                self.report_progress(room, now_s)
        if room.misfit is not None:
            self.fail(room, room.misfit)
            return
        room.progress_at_s = now_s
        if room.written:
            self.succeed(room)
        else:
            self._outbox.add(room)

    def abort(self, room: PrefillRoom, reason: str) -> None:
        if not room.final:
            self.fail(room, reason)

    def close(self, room: PrefillRoom, now_s: float) -> None:
        if not room.released:
            raise RuntimeError(f"room {room.key}: closed in {room.state.name} before its pages were released")
        self.forget(room)
        self._inbox.bury(room.key, room.reason or "the transfer has ended", by_peer=False, now_s=now_s)

    # ---- moves

    def accept(self, room: PrefillRoom, offer: Offer) -> None:
        room.offer = offer
        self.move(room, KVPoll.WaitingForInput)

    def succeed(self, room: PrefillRoom) -> None:
        self.move(room, KVPoll.Success)
        self._counters["succeeded"] += 1
        self._report(room, KVPoll.Success)

    def fail(self, room: PrefillRoom, reason: str, *, report: bool = True) -> None:
        room.reason = reason  # first: a handle that reads Failed reads this without the lock
        self.move(room, KVPoll.Failed)
        self._counters["failed"] += 1
        room.end()
        room.owes_drained = room.offer is not None
        if report:
            self._report(room, KVPoll.Failed)
            self.report_drained(room)

    def fail_all_of(self, peer: DecodePeer, reason: str) -> None:
        for room in self.of(peer):
            self.abort(room, reason)

    # ---- reports to decode

    def report_progress(self, room: PrefillRoom, now_s: float) -> None:
        room.reported_at_s = now_s
        self._report(room, KVPoll.Transferring)

    def report_drained(self, room: PrefillRoom) -> None:
        if room.owes_drained and room.quiet and room.peer is not None:
            room.owes_drained = False
            self._paths.drained(room.peer, room.key, room.write_try)

    def reject(self, peer: DecodePeer, key: RoomKey, reason: str) -> None:
        """Fail a room of decode that does not exist here."""
        self._peers.send(peer, Status(*self._peers.address(peer), *key, KVPoll.Failed, 0, clip(reason)))
        self._paths.drained(peer, key, 0)

    def _report(self, room: PrefillRoom, state: KVPoll) -> None:
        if room.peer is not None:
            reason = clip(f"prefill: {room.reason}") if room.reason else ""
            num_pages = room.done_bytes // room.peer.path.page_bytes
            row = room.row if state is KVPoll.Success else b""
            what = (*self._peers.address(room.peer), *room.key, state, num_pages, reason, room.write_try, row)
            self._peers.send(room.peer, Status(*what))

    def check(self) -> None:
        for room in self:
            room.check()
