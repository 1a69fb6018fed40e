"""Which rank writes which bytes of a state to which rank: each byte once, from one that has it, whatever the two shapes. Pure."""

from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest

from tests.transfer.cores import ARGS
from transfer_backends.contract import I64, Extent, KVArgs, RankMemory, Region, SideMemory, SidePool
from transfer_backends.shards import SideShard, pairs_of, plan_side_shards, side_misfit

UNITS, LAYERS, SLOTS = 4, 3, 8
UNIT = (6, 2, 40)  # bytes of a unit in each of a layer's parts, which lie one behind the other in the model's item
LAYER = UNITS * sum(UNIT)
SRC, DST = np.array([3, 5]), np.array([6, 2])


@dataclass(frozen=True)
class Cut:
    """`cuts`: of the layers. `pad`: bytes behind each layer. `copies`: ranks of a stage that have the second part of a unit in common."""

    tp: int
    cuts: tuple[int, ...] = (0, LAYERS)
    pad: int = 0
    copies: int = 1


def args_of(cut: Cut) -> KVArgs:
    ranks, base = [], 1 << 42
    for (first, end), rank in product(pairwise(cut.cuts), range(cut.tp)):
        extents, at = [], 0
        for layer in range(first, end):
            begin = layer * LAYER
            for part, size in enumerate(UNIT):
                sharers = cut.copies if part == 1 else 1
                own = UNITS // cut.tp * sharers * size
                extents.append(Extent(begin + rank // sharers * own, at, own))
                begin, at = begin + UNITS * size, at + own
            at += cut.pad
        side = SideMemory(Region(base, SLOTS, at, None), tuple(extents))
        ranks.append(RankMemory(ARGS.kv, 0, 1, 0, 1, pools=(side,)))
        base += 1 << 20
    return replace(ARGS, pools=(SidePool("state", LAYERS * LAYER),), ranks=tuple(ranks))


def bytes_of(memory: SideMemory, address: int, size: int, slots: I64) -> list[tuple[int, int]]:
    """(place of the slot, byte of the model's item) of each byte from `address`; -1: padding."""
    found = []
    for byte in range(address - memory.region.base_ptr, address - memory.region.base_ptr + size):
        slot, at = divmod(byte, memory.region.item_bytes)
        begins = [e.begin + at - e.at for e in memory.extents if e.at <= at < e.at + e.size]
        found.append((int(np.flatnonzero(slots == slot)[0]), begins[0] if begins else -1))
    return found


def planned(shards: tuple[SideShard, ...], most: int) -> list[tuple[int, int, int, int, int]]:
    found = []
    for shard in shards:
        pieces = shard.plan(SRC, DST, max_piece_bytes=most)
        assert (pieces.src_rank, pieces.dst_rank) == shard.pair
        rows = zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.lengths.tolist(), strict=True)
        found += [(*shard.pair, *row) for row in rows]
    return found


CUTS = [
    Cut(1),
    Cut(1, pad=8),
    Cut(2),
    Cut(4, pad=4),
    Cut(2, (0, 1, 3)),
    Cut(1, (0, 2, 3), pad=8),
    Cut(4, copies=2),
    Cut(2, copies=2),
]


@pytest.mark.parametrize(("here", "there"), list(product(CUTS, CUTS)), ids=str)
@pytest.mark.parametrize("most", [7, 1 << 30])
def test_each_rank_gets_each_byte_once(here: Cut, there: Cut, most: int) -> None:
    mine, theirs = args_of(here), args_of(there)
    assert side_misfit(mine, theirs.ranks) is None
    got: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(len(theirs.ranks))}
    for src_rank, dst_rank, src, dst, size in planned(plan_side_shards(mine, theirs.ranks), most):
        assert 0 < size <= most
        source, target = mine.ranks[src_rank].pools[0], theirs.ranks[dst_rank].pools[0]
        read, written = bytes_of(source, src, size, SRC), bytes_of(target, dst, size, DST)
        assert read == written
        got[dst_rank] += [byte for byte in written if byte[1] >= 0]
    for rank, memory in enumerate(theirs.ranks):
        wanted = [byte for e in memory.pools[0].extents for byte in range(e.begin, e.begin + e.size)]
        assert sorted(got[rank]) == sorted(product(range(len(DST)), wanted))


def test_what_is_cut_alike_crosses_in_one_piece() -> None:
    mine = args_of(Cut(2, (0, 1, 3), pad=4))
    shards = plan_side_shards(mine, mine.ranks)
    assert [shard.pair for shard in shards] == [(i, i) for i in range(4)]
    assert len(planned(shards, 1 << 30)) == 4 * len(SRC)
    run = shards[0].plan(np.array([3, 4]), np.array([5, 6]), max_piece_bytes=1 << 30)
    assert run.lengths.tolist() == [2 * mine.ranks[0].pools[0].region.item_bytes], "neighbours are one piece"


def test_a_layer_of_another_cut_takes_a_piece_for_each_part() -> None:
    shards = plan_side_shards(args_of(Cut(1)), args_of(Cut(2)).ranks)
    assert [len(shard.strips) for shard in shards] == [LAYERS * len(UNIT)] * 2


@pytest.mark.parametrize("turn", range(4))
def test_copies_do_not_cost_connections(turn: int) -> None:
    """The rank that has most of what a target needs sends the shared part, too."""
    mine = args_of(Cut(4, copies=2))
    shards = plan_side_shards(mine, mine.ranks, turn=turn)
    assert pairs_of(shards) == [(i, i) for i in range(4)]


def test_whole_copies_serve_in_turn() -> None:
    alone = args_of(Cut(1)).ranks[0]
    other = replace(ARGS, pools=(SidePool("state", LAYERS * LAYER),), ranks=(alone, alone))
    found = [[shard.pair[0] for shard in plan_side_shards(other, [alone, alone], turn=turn)] for turn in (0, 1)]
    assert found == [[0, 1], [1, 0]]
