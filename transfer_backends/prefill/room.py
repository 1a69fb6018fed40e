"""State of one transfer on prefill. Pure."""

import math
from collections import deque
from dataclasses import dataclass, field

from transfer_backends.contract import KVArgs
from transfer_backends.kvpoll import KVPoll
from transfer_backends.merge import I64
from transfer_backends.prefill.inbox import Offer
from transfer_backends.prefill.paths import DecodePeer
from transfer_backends.prefill.posts import Chunk, Post
from transfer_backends.rooms import Room


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
        if enough and (not self.all_queued or _counts(self.tail) == _counts(self.offer.tail)):
            return None
        if enough:
            return f"decode gave {_counts(self.offer.tail)} items beside pages, prefill has {_counts(self.tail)}"
        word = "at least " * (not self.all_queued)
        return f"decode gave {given} pages, prefill has {word}{needed}: the two prompts differ"

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
    if len(src) and not (src.min() >= 0 and src.max() < args.num_pages):
        raise ValueError(f"room {room.key}: a source page is outside the pool of {args.num_pages}")
    if row is not None and not 0 <= row < args.aux.num_items:
        raise ValueError(f"room {room.key}: metadata_row {row} is outside 0..{args.aux.num_items - 1}")
    if len(chunk.tail) != (len(args.pools) if chunk.last else 0):
        raise ValueError(
            f"room {room.key}: items of {len(chunk.tail)} pools, the last chunk has {len(args.pools)}, others none"
        )
    for number, (pool, ids) in enumerate(zip(args.pools, chunk.tail, strict=False)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < args.num_items(number)):
            raise ValueError(f"room {room.key}: an item of {pool.kind} is outside its {args.num_items(number)}")
