"""Who writes what between workers of several ranks: each byte of a page once, in as few pieces as can be. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import msgspec
import numpy as np
import pytest

from service.kv_layout import layout_conflict
from tests.transfer.cores import CAPS, CONFIG, MARK
from tests.transfer.ranks.rank_memory import Model, Side, args_of
from transfer_backends.contract import I64, Gate, KVArgs, LayerGroup, Progress, RankMemory, Region
from transfer_backends.prefill.inbox import Chunk, Offer, num_open, plan_ops
from transfer_backends.prefill.paths import DecodePeer, Path, Paths, PeerAdmission
from transfer_backends.shards import LEADERS, misfit, pairs_of, plan_shards, unpack_descriptors
from transfer_backends.sides import PeerTable
from transfer_backends.wire import Refused, Register, layout_of

SIZES = (1, 2, 4)
SIDES = tuple(Side(tp, pp) for tp, pp in product(SIZES, (1, 2)))
MODELS = (Model(heads=4, layers=4), Model(heads=2, layers=5), Model(heads=1, layers=3, padding=4))
WIDE = replace(CAPS, max_piece_bytes=1 << 40, max_post_bytes=1 << 40, max_post_pieces=1 << 20)
SRC, DST = np.array([3, 4, 5, 9, 10]), np.array([7, 8, 9, 2, 12])  # runs of three, one, and one page


def both(model: Model, prefill: Side, decode: Side) -> Iterator[tuple[KVArgs, KVArgs]]:
    """With the fewest units that the model allows for this pair, and with the most."""
    fewest = min(model.heads, max(prefill.tp, decode.tp))
    for units in sorted({fewest, model.heads}):
        yield args_of(model, prefill, units, num_pages=16), args_of(model, decode, units, num_pages=16)


def planned(
    prefill: KVArgs, decode: KVArgs, *, groups: tuple[int, int] = (0, 1), gate: Gate | None = None
) -> list[tuple[int, int, int, int, int]]:
    """(source rank, target rank, source address, target address, bytes) of every piece of five pages."""
    found = []
    for pieces, _ in plan_ops(
        Chunk(SRC, 0, None, gate), offer_of(prefill, decode, DST), groups=groups, args=prefill, caps=WIDE
    ):
        rows = zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.lengths.tolist(), strict=True)
        found += [(pieces.src_rank, pieces.dst_rank, *row) for row in rows]
    return found


def offer_of(prefill: KVArgs, decode: KVArgs, pages: I64) -> Offer:
    message = Register("d", "p", layout_of(decode, backend="sim"), decode.ranks, decode.aux)
    path = Path.to(message, prefill)
    return Offer(DecodePeer("d", PeerTable(incarnation="p", config=CONFIG).heartbeat(0.0), 0.0, path=path), pages, 0)


def contents(args: KVArgs, rank: int, at: int, size: int, pages: I64) -> list[tuple[int, int, int]]:
    """(position in the prompt, unit, byte of a unit with all layers) of each byte from address `at`; -1: padding."""
    memory = args.ranks[rank]
    base = sum(args.layer_bytes[: memory.first_layer])
    held = sum(args.layer_bytes[memory.first_layer : memory.layers.stop])
    found = []
    for byte in range(at - memory.kv.base_ptr, at - memory.kv.base_ptr + size):
        item, offset = divmod(byte, memory.kv.item_bytes)
        page, unit = divmod(item, memory.num_units)
        position = int(np.flatnonzero(pages == page)[0])
        found.append((position, memory.first_unit + unit, base + offset if offset < held else -1))
    return found


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(("prefill", "decode"), list(product(SIDES, SIDES)), ids=str)
def test_each_rank_gets_each_byte_of_its_pages_once(model: Model, prefill: Side, decode: Side) -> None:
    """And it is the same byte: of this page of the prompt, this unit, and this layer. Whole, and layer by layer."""
    for mine, theirs in both(model, prefill, decode):
        assert_complete(mine, theirs)


def assert_complete(mine: KVArgs, theirs: KVArgs) -> None:
    assert misfit(mine, theirs.ranks) is None
    ends = [sum(mine.layer_bytes[:end]) for end in (1, len(mine.layer_bytes))]
    layered = replace(mine, groups=(LayerGroup(1, ends[0]), LayerGroup(len(mine.layer_bytes), ends[1])))
    gate = Gate(1, by_layer=True)
    by_layer = [piece for at in (0, 1) for piece in planned(layered, theirs, groups=(at, at + 1), gate=gate)]
    for pieces in (planned(mine, theirs), by_layer):
        got: dict[int, set[tuple[int, int, int]]] = {rank: set() for rank in range(len(theirs.ranks))}
        for src_rank, dst_rank, src, dst, size in pieces:
            here = contents(mine, src_rank, src, size, SRC)
            assert here == contents(theirs, dst_rank, dst, size, DST)
            real = {byte for byte in here if byte[2] >= 0}
            assert not real & got[dst_rank], "a byte is written twice"
            got[dst_rank] |= real
        for number, rank in enumerate(theirs.ranks):
            base = sum(theirs.layer_bytes[: rank.first_layer])
            end = sum(theirs.layer_bytes[: rank.layers.stop])
            assert got[number] == set(product(range(len(SRC)), rank.units, range(base, end)))


def test_stages_that_are_cut_at_other_layers() -> None:
    """Some stages of the two have equally many bytes, and not the same."""
    sides = []
    for cuts in ((0, 3, 5), (0, 2, 5)):
        stages = [
            RankMemory(Region((i + 1) << 20, 16, 4 * (end - begin), None), 0, 1, begin, end - begin)
            for i, (begin, end) in enumerate(pairwise(cuts))
        ]
        aux = Region(1 << 40, 4, 64, None)
        sides.append(KVArgs(stages[0].kv, aux, "m", 16, "f32", layer_bytes=(4,) * 5, ranks=tuple(stages)))
    assert_complete(*sides)


@pytest.mark.parametrize(("prefill", "decode"), list(product(SIZES, SIZES)))
def test_pieces(prefill: int, decode: int) -> None:
    """Equal TP: one per run of pages and rank. Else: one per page and pair of ranks."""
    model = Model(heads=4, layers=4)
    units = max(prefill, decode)
    mine, theirs = (args_of(model, Side(tp), units, num_pages=16) for tp in (prefill, decode))
    pieces = planned(mine, theirs)
    num_pairs = len(pairs_of(plan_shards(mine, theirs.ranks)))
    assert num_pairs == units
    assert len(pieces) == (3 if prefill == decode else len(SRC)) * units
    finer = tuple(args_of(model, Side(tp), 4, num_pages=16) for tp in (prefill, decode))
    assert len(planned(*finer)) == len(pieces)  # units of a pair are neighbours, so more of them cost nothing


def test_one_rank_and_one_unit_are_planned_as_pages() -> None:
    """As if there were no ranks: the same addresses, no rank named."""
    kv = [Region(base, 16, 256, None) for base in (1 << 20, 1 << 30)]
    mine, theirs = (KVArgs(region, Region(1 << 40, 4, 64, None), "m", 16, "f32") for region in kv)
    runs = ((3, 7, 3), (9, 2, 1), (10, 12, 1))
    assert planned(mine, theirs) == [
        (0, 0, kv[0].base_ptr + src * 256, kv[1].base_ptr + dst * 256, count * 256) for src, dst, count in runs
    ]
    offer = offer_of(mine, theirs, DST)
    assert not offer.peer.path.of_ranks and offer.peer.path.page_bytes == 256


@pytest.mark.parametrize(
    ("prefill", "decode", "turn", "sources"),
    [
        (4, 4, 0, [0, 1, 2, 3]),
        (4, 4, 1, [1, 0, 3, 2]),
        (4, 2, 0, [0, 2]),
        (4, 2, 1, [1, 3]),
        (4, 1, 0, [0, 2]),
        (2, 4, 0, [0, 0, 1, 1]),
        (4, 8, 0, [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_replicas_share_the_load(prefill: int, decode: int, turn: int, sources: list[int]) -> None:
    """Two KV heads: each of decode's ranks has one source of a unit, and the copies of prefill serve in turn."""
    mine, theirs = (args_of(Model(heads=2, layers=2), Side(tp), 2, num_pages=16) for tp in (prefill, decode))
    shards = plan_shards(mine, theirs.ranks, turn=turn)
    assert [shard.pair[0] for shard in shards] == sources
    assert sorted({pair[0] for pair in pairs_of(shards)} - {0}) == sorted(set(sources) - {0})


def test_pairs_take_turns_so_that_all_links_are_busy() -> None:
    mine, theirs = (args_of(Model(heads=2, layers=2), Side(2), 2, num_pages=16) for _ in range(2))
    caps = replace(WIDE, max_post_pieces=1)
    ops = plan_ops(Chunk(SRC, 0, None), offer_of(mine, theirs, DST), groups=(0, 1), args=mine, caps=caps)
    assert [pieces.src_rank for pieces, _ in ops] == [0, 1, 0, 1, 0, 1]


def test_the_leaders_are_connected_for_the_metadata_row() -> None:
    """Where a replica serves decode's first rank, too."""
    mine, theirs = (args_of(Model(heads=1, layers=2), Side(tp), 1, num_pages=16) for tp in (2, 1))
    shards = plan_shards(mine, theirs.ranks, turn=1)
    assert [shard.pair for shard in shards] == [(1, 0)] and pairs_of(shards) == [LEADERS, (1, 0)]
    described = tuple(msgspec.structs.replace(rank, descriptor=b"d") for rank in theirs.ranks)
    path = Path.to(Register("d", "p", layout_of(theirs, backend="sim"), described, theirs.aux), mine, turn=1)
    assert path.of_ranks and path.shards == shards
    assert [(c.src_rank, c.dst_rank, c.descriptor) for c in unpack_descriptors(path.descriptor)] == [
        (0, 0, b"d"),
        (1, 0, b"d"),
    ]


@pytest.mark.parametrize(("prefill", "decode"), list(product((1, 2), (1, 2))))
def test_an_engine_of_several_ranks_is_given_descriptors_by_pair(prefill: int, decode: int) -> None:
    """Also where all of a replica's bytes come from the leader: its engine is the one of all ranks."""
    mine, theirs = (args_of(Model(heads=1, layers=2), Side(tp), 1, num_pages=16) for tp in (prefill, decode))
    path = Path.to(Register("d", "p", layout_of(theirs, backend="sim"), theirs.ranks, theirs.aux), mine)
    assert path.of_ranks == (prefill > 1 or decode > 1)
    assert not path.of_ranks or unpack_descriptors(path.descriptor)[0].src_rank == 0


# ---- gates: what the leader's marks prove of the others


@pytest.mark.parametrize(
    ("side", "proven"), [(Side(1), [0, 1, 2, 3, 4]), (Side(2), [0, 0, 1, 2, 3]), (Side(1, 2), [0, 2, 3])], ids=str
)
def test_a_mark_of_the_leader_proves_the_layer_before_it_of_all_ranks(side: Side, proven: list[int]) -> None:
    """Of the last stage, also all layers of the stages before it."""
    args = args_of(Model(heads=2, layers=4), side, 2, num_pages=16)
    assert [args.written(layers) for layers in range(len(proven))] == proven
    args = replace(args, groups=tuple(LayerGroup(end, 0) for end in (1, 2, 4)))
    chunk, last = Chunk(SRC, 0, None, Gate(5, by_layer=True)), args.ranks[0].num_layers
    opened = [num_open(chunk, Progress(5, layers), args) for layers in range(last + 1)]
    assert opened == [sum(end <= layers for end in (1, 2, 4)) for layers in proven]
    changes = {layers for layers in range(1, last + 1) if opened[layers] != opened[layers - 1]}
    assert changes <= set(args.marks()) <= set(range(1, last + 1)) and args.marks()
    assert num_open(chunk, Progress(6, 0), args) == 3  # the end of the step proves its last layer


# ---- what a peer may say of its ranks

MINE = args_of(Model(heads=4, layers=4), Side(2), 4, num_pages=16)
GOOD, ROWS = MINE.ranks, MINE.aux


def changed(rank: int, **changes: object) -> tuple[object, ...]:
    return tuple(msgspec.structs.replace(one, **changes) if i == rank else one for i, one in enumerate(GOOD))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (GOOD[:1], "none of decode's 1 ranks has unit 2 of layer 0"),
        (changed(1, first_unit=0), "none of decode's 2 ranks has unit 2 of layer 0"),
        (changed(1, first_unit=3), "decode's rank 1 has units up to 5 and layers up to 4, the model has 4 and 4"),
        (changed(0, num_layers=5), "decode's rank 0 has units up to 2 and layers up to 5, the model has 4 and 4"),
        (changed(1, num_layers=3), "none of decode's 2 ranks has unit 2 of layer 3"),
        (changed(0, kv=Region(1, 32, 20, None)), "bytes of a unit of a page differ: prefill has 16, decode has 20"),
        (
            changed(0, kv=Region(1, 32, 4, None), first_layer=1, num_layers=3),
            "rank 0 has 4 bytes of a unit, its layers have 12",
        ),
        (changed(1, kv=Region(1, 1, 16, None)), "decode's rank 1 has 1 units, less than a page"),
        (changed(1, kv=Region(2**63 - 1, 2**31, 2**40, None)), "address space"),
        (changed(0, kv=Region(0, 0, 16, None)), "address space"),
        (changed(0, kv=Region(1 << 20, 2**31 + 1, 16, None)), "address space"),
        (changed(0, kv=Region(1, 32, 0, None)), "bytes of a unit of a page differ: prefill has 16, decode has 0"),
        (changed(0, kv=Region(ROWS.base_ptr - 16, 2, 16, None)), "overlap"),
        (changed(0, kv=Region(ROWS.base_ptr + ROWS.size_bytes - 1, 32, 16, None)), "overlap"),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(ranks: tuple[object, ...], said: str) -> None:
    refused = registered(MINE, ranks)
    assert isinstance(refused, Refused) and said in refused.reason, refused
    assert not isinstance(registered(MINE, GOOD), Refused)


def registered(args: KVArgs, ranks: tuple[object, ...]) -> object:
    """What prefill answers to such ranks at once; None: it connects."""
    peers: PeerTable[DecodePeer] = PeerTable(incarnation="p", config=CONFIG)
    admission = PeerAdmission(
        peers,
        Paths(peers, settle_s=1.0, resend_s=1.0),
        marks=(MARK,),
        kv_args=args,
        backend="sim",
        handshake_timeout_s=1.0,
    )
    admission.register("link", Register("d", "p", layout_of(args, backend="sim"), ranks, args.aux), 0.0)  # type: ignore[arg-type]
    return peers.effects.queue[0].message if peers.effects.queue else None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_units": 2}, "kv_units differs: p has 4, d has 2; give both workers one --kv-units"),
        ({"layer_bytes": (4, 4, 4)}, "num_layers differs: p has 4, d has 3"),
        ({"layer_bytes": (4, 4, 8, 4)}, "bytes of layer 2 in a unit of a page differs: p has 4, d has 8"),
    ],
)
def test_a_mismatch_of_units_or_layers_is_named_with_both_values(changes: dict[str, object], said: str) -> None:
    mine = layout_of(MINE, backend="sim")
    assert layout_conflict(mine, mine, me="p", them="d") is None
    conflict = layout_conflict(mine, msgspec.structs.replace(mine, **changes), me="p", them="d")
    assert conflict is not None and conflict.startswith(said)
