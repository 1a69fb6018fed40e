"""Plan of engine operations: source and destination bytes of a chunk. Pure."""

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from transfer_backends.contract import Caps, Gate, KVArgs, Pieces, Progress
from transfer_backends.kvpoll import RoomKey
from transfer_backends.merge import I64, batches, plan_pieces
from transfer_backends.prefill.inbox import Offer


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
    """Return (pieces, page bytes) of each operation for layer groups from..until of a chunk.

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
        pieces = beside.plan(here, there, max_piece_bytes=caps.max_piece_bytes)
        parts = batches(pieces, max_pieces=caps.max_post_pieces, max_bytes=caps.max_post_bytes)
        planned += [(part, 0) for part in parts]
    if chunk.metadata_row is not None and chunk.row is None:
        rows = np.array([chunk.metadata_row], np.int64), np.array([offer.metadata_row], np.int64)
        aux = path.memory.aux
        planned.append((plan_pieces(*rows, src=args.aux, dst=aux, max_piece_bytes=args.aux.item_bytes), 0))
    return planned
