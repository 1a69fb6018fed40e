"""Plan of extra-state bytes between ranks with different TP. Pure.

Items (a request's state, say) are cut differently per TP size; a rank's parts are contiguous:

  model      | layer 0: q | k | v | heads | layer 1: q | k | v | heads |
  rank 0     | q0 | k0 | v0 | heads 0 | q0 | k0 ...   extents: [q0], [k0], [v0 with heads 0], ...

A pair exchanges common bytes in few strips. The source with most of them serves, for few
connections.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from transfer_backends.contract import Extent, KVArgs, Pieces, RankMemory, Region, SideMemory
from transfer_backends.merge import I64, plan_items, plan_strips
from transfer_backends.shards import LEADERS, Pair


class Strip(NamedTuple):
    src: int
    dst: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SideShard:
    """Part of each item that a pair exchanges; `whole` includes padding and merges neighbours."""

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
            strips = [part for strip in self.strips for part in _parts(strip, max_piece_bytes)]
            pieces = _joined(
                plan_strips(src, dst, src=self.src, dst=self.dst, begin=(at, to), size_bytes=size)
                for at, to, size in strips
            )
        return pieces if self.pair == LEADERS else replace(pieces, src_rank=self.pair[0], dst_rank=self.pair[1])


def plan_side_shards(mine: KVArgs, theirs: Sequence[RankMemory], *, turn: int = 0) -> tuple[SideShard, ...]:
    """Return the shards of each pool, each decode rank with every byte once."""
    shards = []
    for pool in range(len(mine.pools)):
        sources = [rank.pools[pool] for rank in mine.ranks]
        for number, theirs_one in enumerate(theirs):
            shards += _shards_to(pool, number, theirs_one.pools[pool], sources, turn=turn)
    return tuple(shards)


def side_misfit(mine: KVArgs, theirs: Sequence[RankMemory]) -> str | None:
    """Return an error in the pools of a decode worker, if any."""
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
    in_common = [_size_of(_common(source.extents, target.extents)) for source in sources]
    order = sorted(range(len(sources)), key=lambda i: (-in_common[i], (i - turn - number) % len(sources)))
    wanted, shards = list(target.extents), []
    for i in order:
        source = sources[i]
        found = _common(source.extents, wanted)
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


def _common(mine: Iterable[Extent], theirs: Iterable[Extent]) -> list[_Found]:
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


def _size_of(found: Iterable[_Found]) -> int:
    return sum(part.strip.size for part in found)


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


def _parts(strip: Strip, most: int) -> list[Strip]:
    return [Strip(strip.src + at, strip.dst + at, min(most, strip.size - at)) for at in range(0, strip.size, most)]


def _joined(strips: Iterable[Pieces]) -> Pieces:
    parts = list(strips)
    return replace(
        parts[0],
        src=np.concatenate([part.src for part in parts]),
        dst=np.concatenate([part.dst for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
    )
