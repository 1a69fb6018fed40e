"""What prefill's rooms send: their records, the check of a `send`, and the plan of its engine operations. Pure."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from transfer_backends.contract import Caps, KVArgs, Pieces
from transfer_backends.kvpoll import RoomKey
from transfer_backends.merge import I64, batches, plan_pieces
from transfer_backends.prefill_inbox import Offer
from transfer_backends.prefill_peers import Peer


@dataclass(frozen=True)
class Chunk:
    src: I64
    dst_start: int
    aux_idx: int | None


@dataclass(eq=False)
class Post:
    """One engine operation to start. `num_pages`: KV pages in it (0: the metadata row). `retry`: of which try it is."""

    key: RoomKey
    incarnation: str
    pieces: Pieces
    num_pages: int
    retry: int = 0


@dataclass
class Room:
    """`queued_pages`: handed over by `send`; `done_pages`: written; `num_ops`: operations that are not final.

    `dirty`: an operation failed, and no fence has held since. `undrained`: decode waits for `Drained`.
    `given`: every chunk that was handed over, in order, to begin anew with; `retry`: tries that failed; `held`: the next
    one waits until nothing of the last can still write.
    """

    key: RoomKey
    opened_at_s: float
    offer: Offer | None = None
    chunks: deque[Chunk] = field(default_factory=deque)
    posts: deque[Post] = field(default_factory=deque)
    queued_pages: int = 0
    done_pages: int = 0
    all_queued: bool = False
    num_ops: int = 0
    dirty: bool = False
    undrained: bool = False
    reason: str | None = None
    progress_at_s: float = 0.0
    told_at_s: float = 0.0
    given: list[Chunk] = field(default_factory=list)
    retry: int = 0
    held: bool = False

    def hold(self) -> None:
        """A write failed: post nothing more for now."""
        self.retry += 1
        self.held = True
        self.chunks.clear()
        self.posts.clear()

    def begin_anew(self) -> None:
        """All of it, to the same pages."""
        assert self.held and self.quiet
        self.held = False
        self.chunks.extend(self.given)

    @property
    def quiet(self) -> bool:
        return self.num_ops == 0 and not self.dirty


def check_send(rec: Room, src: I64, *, args: KVArgs, dst_start: int, last: bool, aux_idx: int | None) -> None:
    """Raises ValueError for a chunk that our own role got wrong."""
    if dst_start != rec.queued_pages:
        raise ValueError(f"room {rec.key}: dst_start {dst_start} leaves a gap (next is {rec.queued_pages})")
    if len(src) and not (src.min() >= 0 and src.max() < args.kv.num_items):
        raise ValueError(f"room {rec.key}: a source page is outside the pool of {args.kv.num_items}")
    if last and (aux_idx is None or not 0 <= aux_idx < args.aux.num_items):
        raise ValueError(f"room {rec.key}: aux_idx {aux_idx} is outside 0..{args.aux.num_items - 1}")


def plan_posts(chunk: Chunk, rec: Room, peer: Peer, *, args: KVArgs, caps: Caps) -> list[Post]:
    """Engine operations of a chunk, the metadata row (of the last chunk) at the end."""
    assert rec.offer is not None
    dst = rec.offer.pages[chunk.dst_start : chunk.dst_start + len(chunk.src)]
    kv = plan_pieces(chunk.src, dst, src=args.kv, dst=peer.kv, max_piece_bytes=caps.max_piece_bytes)
    posts = [
        Post(rec.key, peer.incarnation, part, part.size_bytes // args.kv.item_bytes, rec.retry)
        for part in batches(kv, max_pieces=caps.max_post_pieces, max_bytes=caps.max_post_bytes)
    ]
    if chunk.aux_idx is not None:
        rows = np.array([chunk.aux_idx], np.int64), np.array([rec.offer.aux_idx], np.int64)
        aux = plan_pieces(*rows, src=args.aux, dst=peer.aux, max_piece_bytes=args.aux.item_bytes)
        posts.append(Post(rec.key, peer.incarnation, aux, 0, rec.retry))
    return posts
