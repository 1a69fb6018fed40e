"""Operations to post next: rooms round robin, chunks as gates open, in the window. Pure."""

from collections import deque

from transfer_backends.contract import NOTHING_YET, Caps, KVArgs, Progress
from transfer_backends.kvpoll import RoomKey
from transfer_backends.peers import PeerTable
from transfer_backends.prefill.paths import DecodePeer, Path
from transfer_backends.prefill.posts import Post, num_groups, num_open, plan_ops
from transfer_backends.prefill.room import PrefillRoom

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
