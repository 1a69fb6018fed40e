"""What prefill's rooms send: their records, the check of a `send`, and the plan of its engine operations. Pure."""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from transfer_backends.contract import Caps, Gate, KVArgs, Pieces, Progress
from transfer_backends.kvpoll import RoomKey
from transfer_backends.merge import I64, batches, plan_pieces, plan_strips
from transfer_backends.prefill.inbox import Offer
from transfer_backends.prefill.peers import Peer


@dataclass(frozen=True)
class Chunk:
    """Pages of a prompt from its page `start` on. `gate`: what has to happen before they may leave, None: nothing."""

    src: I64
    start: int
    metadata_row: int | None
    gate: Gate | None = None


@dataclass(eq=False)
class Post:
    """One engine operation to start. `kv_bytes`: of pages (0: the metadata row). `retry`: of which try it is."""

    key: RoomKey
    incarnation: str
    pieces: Pieces
    kv_bytes: int
    retry: int = 0


@dataclass
class Room:
    """`queued_pages`: of the prompt, handed over by `send`; `done_bytes`: of

    pages, written; `num_ops`: operations that are not final.

    `left_groups`: groups of layers of the first chunk that have been planned.

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
    left_groups: int = 0
    done_bytes: int = 0
    all_queued: bool = False
    num_ops: int = 0
    dirty: bool = False
    undrained: bool = False
    reason: str | None = None
    progress_at_s: float = 0.0
    told_at_s: float = -math.inf
    given: list[Chunk] = field(default_factory=list)
    retry: int = 0
    held: bool = False

    @property
    def misfit(self) -> str | None:
        """What is wrong with the number of pages that were handed over."""
        assert self.offer is not None
        needed, given = self.queued_pages - self.offer.skip_pages, len(self.offer.pages)
        if needed <= given and not (self.all_queued and needed != given):
            return None
        word = "at least " * (not self.all_queued)
        return f"decode gave {given} pages, prefill has {word}{needed}: the two prompts differ"

    def hold(self) -> None:
        """A write failed: post nothing more for now."""
        self.retry += 1
        self.held = True
        self.clear()

    def clear(self) -> None:
        """Nothing is left to post."""
        self.chunks.clear()
        self.posts.clear()
        self.left_groups = 0

    def begin_anew(self) -> None:
        """All of it, to the same pages."""
        assert self.held and self.quiet
        self.held = False
        self.chunks.extend(self.given)

    @property
    def quiet(self) -> bool:
        return self.num_ops == 0 and not self.dirty


def check_send(
    rec: Room,
    src: I64,
    *,
    args: KVArgs,
    start: int,
    last: bool,
    metadata_row: int | None,
    gate: Gate | None = None,
) -> None:
    """Raises ValueError for a chunk that our own role got wrong."""
    if last and gate is not None:
        raise ValueError(f"room {rec.key}: the last chunk has a gate, its metadata row would vouch for pages to come")
    if gate is not None and gate.by_layer and not args.groups:
        raise ValueError(f"room {rec.key}: pages are to leave by layers, and nothing says where layers end")
    if start != rec.queued_pages:
        raise ValueError(f"room {rec.key}: start {start} leaves a gap (next is {rec.queued_pages})")
    if len(src) and not (src.min() >= 0 and src.max() < args.kv.num_items):
        raise ValueError(f"room {rec.key}: a source page is outside the pool of {args.kv.num_items}")
    if last and (metadata_row is None or not 0 <= metadata_row < args.aux.num_items):
        raise ValueError(f"room {rec.key}: metadata_row {metadata_row} is outside 0..{args.aux.num_items - 1}")


def num_open(chunk: Chunk, progress: Progress, args: KVArgs) -> int:
    """How many of the groups of layers of its pages may leave, of `num_groups`."""
    gate = chunk.gate
    if gate is None or progress.step > gate.step:
        return num_groups(chunk, args)
    if progress.step < gate.step:
        return 0
    return sum(group.end_layer <= progress.layers for group in args.groups) if gate.by_layer else 1


def num_groups(chunk: Chunk, args: KVArgs) -> int:
    """1: its pages leave whole."""
    return len(args.groups) if chunk.gate is not None and chunk.gate.by_layer else 1


def plan_posts(chunk: Chunk, rec: Room, peer: Peer, *, until: int, args: KVArgs, caps: Caps) -> list[Post]:
    """Engine operations of a chunk from `rec.left_groups` up to group `until`; with its last one the metadata row.

    A chunk of which all is there is written page by page, merged where pages adjoin. What decode has already is left out.
    """
    assert rec.offer is not None
    src = chunk.src[max(0, rec.offer.skip_pages - chunk.start) :]
    first = max(0, chunk.start - rec.offer.skip_pages)
    dst = rec.offer.pages[first : first + len(src)]
    if (rec.left_groups, until) == (0, num_groups(chunk, args)):
        kv = plan_pieces(src, dst, src=args.kv, dst=peer.kv, max_piece_bytes=caps.max_piece_bytes)
    else:
        begin = args.groups[rec.left_groups - 1].end_byte if rec.left_groups else 0
        end = args.groups[until - 1].end_byte
        kv = plan_strips(src, dst, src=args.kv, dst=peer.kv, begin=begin, end=end)
    posts = [
        Post(rec.key, peer.incarnation, part, part.size_bytes, rec.retry)
        for part in batches(kv, max_pieces=caps.max_post_pieces, max_bytes=caps.max_post_bytes)
    ]
    if chunk.metadata_row is not None:
        rows = np.array([chunk.metadata_row], np.int64), np.array([rec.offer.metadata_row], np.int64)
        aux = plan_pieces(*rows, src=args.aux, dst=peer.aux, max_piece_bytes=args.aux.item_bytes)
        posts.append(Post(rec.key, peer.incarnation, aux, 0, rec.retry))
    return posts
