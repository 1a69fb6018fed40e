"""Pieces for page ids; runs contiguous on both sides merge, since engines pay per piece. Pure."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from transfer_backends.contract import U64, Pieces, Region

I64 = npt.NDArray[np.int64]


def merge_runs(src: I64, dst: I64) -> tuple[I64, I64, I64]:
    """Merge ids i64[n] into run starts (src, dst) and lengths in items, each i64[runs]."""
    if len(src) == 0:
        return src, dst, src
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(src)])))
    return src[starts], dst[starts], lengths


def split_runs(src: I64, dst: I64, lengths: I64, *, max_items: int) -> tuple[I64, I64, I64]:
    counts = -(-lengths // max_items)
    first = np.repeat(np.cumsum(counts) - counts, counts)  # first piece of each piece's run
    skip = (np.arange(int(counts.sum())) - first) * max_items
    rest = np.repeat(lengths, counts) - skip
    return np.repeat(src, counts) + skip, np.repeat(dst, counts) + skip, np.minimum(rest, max_items)


def plan_pieces(src_ids: I64, dst_ids: I64, *, src: Region, dst: Region, max_piece_bytes: int) -> Pieces:
    runs = merge_runs(src_ids, dst_ids)
    s, d, n = split_runs(*runs, max_items=max(1, max_piece_bytes // src.item_bytes))
    return _pieces(s, d, n.astype(np.uint64) * np.uint64(src.item_bytes), src=src, dst=dst)


def plan_strips(
    src_ids: I64, dst_ids: I64, *, src: Region, dst: Region, begin: tuple[int, int], size_bytes: int
) -> Pieces:
    """Plan `size_bytes` from byte `begin` (src, dst) of each item: never contiguous."""
    lengths = np.full(len(src_ids), size_bytes, np.uint64)
    return _pieces(src_ids, dst_ids, lengths, src=src, dst=dst, begin=begin)


def plan_items(src_ids: I64, dst_ids: I64, *, src: Region, dst: Region, max_piece_bytes: int) -> Pieces:
    """Plan whole items, which may exceed a piece."""
    size, most = src.item_bytes, max_piece_bytes
    if size <= most:
        return plan_pieces(src_ids, dst_ids, src=src, dst=dst, max_piece_bytes=most)
    strips = [
        plan_strips(src_ids, dst_ids, src=src, dst=dst, begin=(at, at), size_bytes=min(most, size - at))
        for at in range(0, size, most)
    ]
    return Pieces(
        src=np.concatenate([strip.src for strip in strips]),
        dst=np.concatenate([strip.dst for strip in strips]),
        lengths=np.concatenate([strip.lengths for strip in strips]),
        src_device=src.device,
        dst_device=dst.device,
    )


def _pieces(s: I64, d: I64, lengths: U64, *, src: Region, dst: Region, begin: tuple[int, int] = (0, 0)) -> Pieces:
    return Pieces(
        src=np.uint64(src.base_ptr + begin[0]) + s.astype(np.uint64) * np.uint64(src.item_bytes),
        dst=np.uint64(dst.base_ptr + begin[1]) + d.astype(np.uint64) * np.uint64(dst.item_bytes),
        lengths=lengths,
        src_device=src.device,
        dst_device=dst.device,
    )


def batches(pieces: Pieces, *, max_pieces: int, max_bytes: int) -> Iterator[Pieces]:
    """Cut pieces into posts within both limits, one piece at least."""
    total = np.cumsum(pieces.lengths.astype(np.int64))
    begin = 0
    while begin < len(pieces):
        base = int(total[begin - 1]) if begin else 0
        end = int(np.searchsorted(total, base + max_bytes, side="right"))
        end = min(max(end, begin + 1), begin + max_pieces, len(pieces))
        yield Pieces(
            src=pieces.src[begin:end],
            dst=pieces.dst[begin:end],
            lengths=pieces.lengths[begin:end],
            src_device=pieces.src_device,
            dst_device=pieces.dst_device,
            src_rank=pieces.src_rank,
            dst_rank=pieces.dst_rank,
        )
        begin = end
