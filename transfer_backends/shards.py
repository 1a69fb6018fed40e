"""Plan of bytes between ranks of prefill and decode workers with different TP. Pure.

    prefill, 2 ranks                 decode, 4 ranks
    rank 0: units 0 1   -- unit 0 -->  rank 0: unit 0
                        -- unit 1 -->  rank 1: unit 1
    rank 1: units 2 3   -- unit 2 -->  rank 2: unit 2     ...

A pair of ranks exchanges common units and layers, contiguous on both sides: one piece per page, or
per run of pages for equal shards.

Of replicas (more ranks than KV heads, or a latent) a decode rank reads one. `turn` differs between
decode workers, to spread load.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from transfer_backends.contract import I64, U64, Extent, KVArgs, Pieces, RankMemory, Region, SideMemory

# ---- Pieces for ids of pages or items. Runs contiguous on both sides merge: engines pay per piece.


class Strip(NamedTuple):
    src: int
    dst: int
    size: int


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
    """Items may exceed a piece."""
    if src.item_bytes <= max_piece_bytes:
        return plan_pieces(src_ids, dst_ids, src=src, dst=dst, max_piece_bytes=max_piece_bytes)
    strips = [Strip(0, 0, src.item_bytes)]
    return plan_all_strips(src_ids, dst_ids, strips, src=src, dst=dst, max_piece_bytes=max_piece_bytes)


def plan_all_strips(
    src_ids: I64, dst_ids: I64, strips: Iterable[Strip], *, src: Region, dst: Region, max_piece_bytes: int
) -> Pieces:
    parts = []
    for strip in strips:
        for at in range(0, strip.size, max_piece_bytes):
            begin, size = (strip.src + at, strip.dst + at), min(max_piece_bytes, strip.size - at)
            parts.append(plan_strips(src_ids, dst_ids, src=src, dst=dst, begin=begin, size_bytes=size))
    return replace(
        parts[0],
        src=np.concatenate([part.src for part in parts]),
        dst=np.concatenate([part.dst for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
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
        own = slice(begin, end)
        yield replace(pieces, src=pieces.src[own], dst=pieces.dst[own], lengths=pieces.lengths[own])
        begin = end


# ---- KV pages of ranks with different TP

Pair = tuple[int, int]  # (prefill rank, decode rank), indices into KVArgs.ranks
LEADERS: Pair = (0, 0)  # pair that carries the metadata row


@dataclass(frozen=True, kw_only=True)
class Held:
    kv: Region
    num_units: int
    first: int
    begin: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part of each page that a pair exchanges: of `num_units` units the bytes begin..end."""

    pair: Pair
    src: Held
    dst: Held
    num_units: int
    begin: int
    end: int

    @property
    def page_bytes(self) -> int:
        return self.num_units * (self.end - self.begin)

    @cached_property
    def whole(self) -> bool:
        """Units cross with padding, so that neighbours make one piece."""
        return self.end - self.begin == self.src.kv.item_bytes == self.dst.kv.item_bytes

    def plan(self, src: I64, dst: I64, *, begin: int, end: int, max_piece_bytes: int) -> Pieces | None:
        """`src`, `dst`: page ids i64[n]. None if the pair has none of the bytes."""
        begin, end = max(begin, self.begin), min(end, self.end)
        if begin >= end:
            return None
        src, dst = self._units(src, self.src), self._units(dst, self.dst)
        if self.whole and end - begin == self.src.kv.item_bytes:
            pieces = plan_pieces(src, dst, src=self.src.kv, dst=self.dst.kv, max_piece_bytes=max_piece_bytes)
        else:
            at = (self.src.begin + begin - self.begin, self.dst.begin + begin - self.begin)
            pieces = plan_strips(src, dst, src=self.src.kv, dst=self.dst.kv, begin=at, size_bytes=end - begin)
        return pieces if self.pair == LEADERS else replace(pieces, src_rank=self.pair[0], dst_rank=self.pair[1])

    def _units(self, pages: I64, held: Held) -> I64:
        if held.num_units == 1:
            return pages
        units = held.first + np.arange(self.num_units)
        return (pages[:, None] * held.num_units + units).reshape(-1)


def plan_shards(mine: KVArgs, theirs: Sequence[RankMemory], *, turn: int = 0) -> tuple[Shard, ...]:
    """By decode rank, each with every byte of its pages once."""
    ends = [0, *accumulate(mine.layer_bytes)]
    shards, num_served = [], dict.fromkeys(map(_part, mine.ranks), turn)
    for number, theirs_one in enumerate(theirs):
        for part in num_served:
            copies = [i for i, rank in enumerate(mine.ranks) if _part(rank) == part]
            source = copies[num_served[part] % len(copies)]
            shard = _shard((source, number), mine.ranks[source], theirs_one, ends)
            if shard is not None:
                shards.append(shard)
                num_served[part] += 1
    return tuple(shards)


def pairs_of(shards: Iterable["Shard | SideShard"]) -> list[Pair]:
    """Pairs that need a connection, with the leaders."""
    return sorted({LEADERS, *(shard.pair for shard in shards)})


class Connection(msgspec.Struct, frozen=True, array_like=True):
    src_rank: int
    dst_rank: int
    descriptor: bytes


_CONNECTIONS = msgspec.msgpack.Decoder(tuple[Connection, ...])


def pack_descriptors(pairs: Sequence[Pair], theirs: Sequence[RankMemory]) -> bytes:
    return msgspec.msgpack.encode([Connection(src, dst, theirs[dst].descriptor) for src, dst in pairs])


def unpack_descriptors(descriptor: bytes) -> tuple[Connection, ...]:
    return _CONNECTIONS.decode(descriptor)


def misfit(mine: KVArgs, theirs: Sequence[RankMemory]) -> str | None:
    num_units, num_layers = mine.kv_units, len(mine.layer_bytes)
    ends = [0, *accumulate(mine.layer_bytes)]
    held = np.zeros((num_units, num_layers), bool)
    for number, rank in enumerate(theirs):
        if rank.units.stop > num_units or rank.layers.stop > num_layers:
            return (
                f"decode's rank {number} has units up to {rank.units.stop} and layers up to {rank.layers.stop}, "
                f"the model has {num_units} and {num_layers}"
            )
        alike = next((one for one in mine.ranks if one.layers == rank.layers), None)
        if alike is not None and alike.kv.item_bytes != rank.kv.item_bytes:
            return (
                f"bytes of a unit of a page differ: prefill has {alike.kv.item_bytes}, decode has {rank.kv.item_bytes}"
            )
        needed = ends[rank.layers.stop] - ends[rank.layers.start]
        if rank.kv.item_bytes < needed:
            return f"decode's rank {number} has {rank.kv.item_bytes} bytes of a unit, its layers have {needed}"
        if not rank.num_pages:
            return f"decode's rank {number} has {rank.kv.num_items} units, less than a page"
        held[rank.first_unit : rank.units.stop, rank.first_layer : rank.layers.stop] = True
    if not held.all():
        unit, layer = (int(at[0]) for at in np.nonzero(~held))
        return f"none of decode's {len(theirs)} ranks has unit {unit} of layer {layer}"
    return None


def _part(rank: RankMemory) -> tuple[range, range]:
    return rank.units, rank.layers


def _shard(pair: Pair, mine: RankMemory, theirs: RankMemory, ends: Sequence[int]) -> Shard | None:
    units, layers = _common(mine.units, theirs.units), _common(mine.layers, theirs.layers)
    if not units or not layers:
        return None
    begin, end = ends[layers.start], ends[layers.stop]
    sides = [
        Held(
            kv=rank.kv,
            num_units=rank.num_units,
            first=units.start - rank.first_unit,
            begin=begin - ends[rank.first_layer],
        )
        for rank in (mine, theirs)
    ]
    if mine.layers == theirs.layers and mine.kv.item_bytes == theirs.kv.item_bytes:
        end = begin + mine.kv.item_bytes  # with the padding
    return Shard(pair=pair, src=sides[0], dst=sides[1], num_units=len(units), begin=begin, end=end)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


# ---- extra states of ranks with different TP


@dataclass(frozen=True, slots=True, kw_only=True)
class SideShard:
    """Part of each item that a pair exchanges; `whole` includes padding and merges neighbours.

    Plan of extra-state bytes between ranks with different TP. Items (a request's state, say) are
    cut differently per TP size; a rank's parts are contiguous:

     model      | layer 0: q | k | v | heads | layer 1: q | k | v | heads |
     rank 0     | q0 | k0 | v0 | heads 0 | q0 | k0 ...   extents: [q0], [k0], [v0 with heads 0], ...

    The source with most of the common bytes serves, for few connections.
    """

    pool: int
    pair: Pair
    src: Region
    dst: Region
    strips: tuple[Strip, ...]
    whole: bool

    def plan(self, src: I64, dst: I64, *, max_piece_bytes: int) -> Pieces:
        if self.whole:
            pieces = plan_items(src, dst, src=self.src, dst=self.dst, max_piece_bytes=max_piece_bytes)
        else:
            most = max_piece_bytes
            pieces = plan_all_strips(src, dst, self.strips, src=self.src, dst=self.dst, max_piece_bytes=most)
        return pieces if self.pair == LEADERS else replace(pieces, src_rank=self.pair[0], dst_rank=self.pair[1])


def plan_side_shards(mine: KVArgs, theirs: Sequence[RankMemory], *, turn: int = 0) -> tuple[SideShard, ...]:
    """The shards of each pool, each decode rank with every byte once."""
    shards = []
    for pool in range(len(mine.pools)):
        sources = [rank.pools[pool] for rank in mine.ranks]
        for number, theirs_one in enumerate(theirs):
            shards += _shards_to(pool, number, theirs_one.pools[pool], sources, turn=turn)
    return tuple(shards)


def side_misfit(mine: KVArgs, theirs: Sequence[RankMemory]) -> str | None:
    for number, rank in enumerate(theirs):
        if len(rank.pools) != len(mine.pools):
            return (
                f"decode's rank {number} names the memory of {len(rank.pools)} pools, its layout has {len(mine.pools)}"
            )
    for index, pool in enumerate(mine.pools):
        for number, rank in enumerate(theirs):
            if (reason := _misfit_of(rank.pools[index], pool.item_bytes)) is not None:
                return f"decode's rank {number} has {reason} of {pool.kind}"
        held = sorted((extent for rank in theirs for extent in rank.pools[index].extents), key=lambda e: e.begin)
        if (missing := _first_missing(held, pool.item_bytes)) is not None:
            return f"none of decode's {len(theirs)} ranks has byte {missing} of {pool.kind}"
    return None


def _misfit_of(memory: SideMemory, item_bytes: int) -> str | None:
    end = 0
    for extent in memory.extents:
        if extent.begin < end:
            return "bytes twice or in another order"
        end = extent.end
        if end > item_bytes:
            return f"bytes up to {end}, which is more than the {item_bytes}"
        if extent.at + extent.size > memory.region.item_bytes:
            return f"items of {memory.region.item_bytes} bytes, and an extent that ends at {extent.at + extent.size},"
    return None


def _first_missing(held: Sequence[Extent], item_bytes: int) -> int | None:
    end = 0
    for extent in held:
        if extent.begin > end:
            break
        end = max(end, extent.end)
    return end if end < item_bytes else None


def _shards_to(
    pool: int, number: int, target: SideMemory, sources: Sequence[SideMemory], *, turn: int
) -> list[SideShard]:
    in_common = [sum(part.strip.size for part in _common_extents(source.extents, target.extents)) for source in sources]
    order = sorted(range(len(sources)), key=lambda i: (-in_common[i], (i - turn - number) % len(sources)))
    wanted, shards = list(target.extents), []
    for i in order:
        source = sources[i]
        found = _common_extents(source.extents, wanted)
        if not found:
            continue
        wanted = _without(wanted, found)
        whole = source.extents == target.extents and source.region.item_bytes == target.region.item_bytes
        shards.append(
            SideShard(
                pool=pool,
                pair=(i, number),
                src=source.region,
                dst=target.region,
                strips=_merged(found),
                whole=whole,
            )
        )
    assert not wanted, f"no rank of prefill has bytes of pool {pool} that decode's rank {number} needs"
    return shards


class _Found(NamedTuple):
    begin: int
    strip: Strip


def _common_extents(mine: Iterable[Extent], theirs: Iterable[Extent]) -> list[_Found]:
    found = []
    ours, others = list(mine), list(theirs)
    i = j = 0
    while i < len(ours) and j < len(others):
        one, other = ours[i], others[j]
        begin, end = max(one.begin, other.begin), min(one.end, other.end)
        if begin < end:
            strip = Strip(one.at + begin - one.begin, other.at + begin - other.begin, end - begin)
            found.append(_Found(begin, strip))
        if one.end <= other.end:
            i += 1
        else:
            j += 1
    return found


def _without(wanted: Iterable[Extent], found: Sequence[_Found]) -> list[Extent]:
    left, taken = [], iter([*found, None])
    part = next(taken)
    for extent in wanted:
        begin, end = extent.begin, extent.end
        while part is not None and part.begin < end:
            if begin < part.begin:
                left.append(Extent(begin, extent.at + begin - extent.begin, part.begin - begin))
            begin = part.begin + part.strip.size
            part = next(taken)
        if begin < end:
            left.append(Extent(begin, extent.at + begin - extent.begin, end - begin))
    return left


def _merged(found: Iterable[_Found]) -> tuple[Strip, ...]:
    strips: list[Strip] = []
    for strip in sorted(part.strip for part in found):
        last = strips[-1] if strips else None
        if last is not None and (last.src + last.size, last.dst + last.size) == (strip.src, strip.dst):
            strips[-1] = Strip(last.src, last.dst, last.size + strip.size)
        else:
            strips.append(strip)
    return tuple(strips)
