"""What a request has beside pages crosses once, behind its pages and before the metadata row, and again in a second try."""

from dataclasses import replace

import numpy as np
import pytest

from service.kv_layout import layout_conflict
from tests.transfer.cores import ARGS, CAPS, KEY, PAGES, SRC, JoinedCores, prefill_core
from transfer_backends.contract import Extent, RankMemory, Region, SideMemory, SidePool, TargetPages
from transfer_backends.prefill.inbox import Chunk, Post
from transfer_backends.sides import KVPoll, PeerProtocolError
from transfer_backends.wire import Register, TransferInfo, layout_of, pack_ids

STATES = Region(1 << 40, 8, 5000, None)  # a slot takes three pieces of at most 2,048 bytes
WINDOW = Region(1 << 41, 16, 512, None)
POOLS = (SidePool("state", 5000), SidePool("window 8", 512))


def beside(*regions: Region) -> tuple[RankMemory, ...]:
    """A rank that has all of each item."""
    memories = tuple(SideMemory(region, (Extent(0, 0, region.item_bytes),)) for region in regions)
    return (RankMemory(ARGS.kv, 0, 1, 0, 1, pools=memories),)


BOTH = replace(ARGS, pools=POOLS, ranks=beside(STATES, WINDOW))
HERE, THERE = ((3,), (4, 5, 9)), ((6,), (1, 2, 3))


class WithTails(JoinedCores):
    """Decode gives `there`."""

    def __init__(self, there: tuple[tuple[int, ...], ...] = THERE) -> None:
        self.there = there
        super().__init__(BOTH, sends=False)

    def begin(self) -> None:
        self.exchange()
        self.core.rooms.open(*KEY, 0.0)
        self.decode.rooms.provide(self.decode.rooms[KEY], TargetPages(self.pages, 1, tail=self.there), 0.0)
        self.exchange()

    def send_all(self, here: tuple[tuple[int, ...], ...] = HERE) -> None:
        tail = tuple(np.array(ids, np.int64) for ids in here)
        self.core.rooms.send(self.core.rooms[KEY], Chunk(np.array(SRC, np.int64), 0, 1, tail=tail), 0.0)

    def take(self) -> list[Post]:
        """All posts of the try, each done before the next."""
        posts = []
        while (post := self.core.outbox.next_post(0.0)) is not None:
            posts.append(post)
            self.final(post, ok=True)
        return posts


def copies(posts: list[Post], src: Region, dst: Region) -> list[tuple[int, int, int]]:
    """(byte of `src`, byte of `dst`, length) of all that leaves `src`."""
    found = []
    for post in posts:
        for at, to, length in zip(post.pieces.src, post.pieces.dst, post.pieces.lengths, strict=True):
            if src.base_ptr <= int(at) < src.base_ptr + src.size_bytes:
                found.append((int(at) - src.base_ptr, int(to) - dst.base_ptr, int(length)))
    return found


def test_pages_then_tails_then_the_row() -> None:
    pair = WithTails()
    pair.send_all()
    posts = pair.take()
    slot = [(15000 + at, 30000 + at, n) for at, n in ((0, 2048), (2048, 2048), (4096, 904))]
    assert copies(posts, STATES, STATES) == slot
    window = [(4 * 512, 512, 1024), (9 * 512, 3 * 512, 512)]
    assert copies(posts, WINDOW, WINDOW) == window
    order = [
        next(i for i, r in enumerate(regions) if r.base_ptr <= int(post.pieces.src[0]) < r.base_ptr + r.size_bytes)
        for regions in [[ARGS.kv, STATES, WINDOW, ARGS.aux]]
        for post in posts
    ]
    assert order == sorted(order) and set(order) == {0, 1, 2, 3}
    assert sum(post.kv_bytes for post in posts) == len(PAGES) * 1024, "a tail does not count as pages"
    assert pair.states == (KVPoll.Success, KVPoll.Success)


def test_a_second_try_sends_the_tail_again() -> None:
    pair = WithTails()
    pair.send_all()
    first = pair.posts()
    for post in first[:-1]:
        pair.final(post, ok=True)
    pair.final(first[-1], ok=False)
    pair.core.completions.on_fenced("d", ok=True, now_s=0.0)
    assert len(copies(pair.take(), STATES, STATES)) == 3
    assert pair.states == (KVPoll.Success, KVPoll.Success)


def test_another_number_of_items_fails_the_room() -> None:
    pair = WithTails(there=((), (1, 2, 3)))
    pair.send_all()
    pair.exchange()
    assert pair.core.rooms[KEY].reason == "decode gave [0, 3] items beside pages, prefill has [1, 3]"
    assert pair.states == (KVPoll.Failed, KVPoll.Failed) and pair.posts() == []


@pytest.mark.parametrize(
    ("tail", "what"),
    [
        ((), "items of 0 pools, there are 2"),
        (((8,), ()), "outside decode's pool 0 of 8"),
        (((-1,), ()), "outside decode's pool 0 of 8"),
        (((1,), (2, 2)), "an item of pool 1 is given twice"),
    ],
)
def test_junk_from_decode_is_refused(tail: tuple[tuple[int, ...], ...], what: str) -> None:
    pair = WithTails()
    packed = tuple(pack_ids(np.array(ids, np.int64)) for ids in tail)
    with pytest.raises(PeerProtocolError, match=what):
        pair.core.on_message("link", TransferInfo("d", "p", 9, 0, pack_ids(np.array([1])), 2, 0, packed), 0.0)


def test_our_own_mistakes_are_errors() -> None:
    pair = WithTails()
    with pytest.raises(ValueError, match="items of 1 pools, the last chunk has 2"):
        pair.send_all(((1,),))
    with pytest.raises(ValueError, match="an item of window 8 is outside its 16"):
        pair.send_all(((1,), (16,)))


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ((), r"what a request has beside pages differs: prefill has \['state', 'window 8'\], decode has \[\]"),
        ((POOLS[0], SidePool("window 9", 512)), "decode has .*'window 9'"),
        (
            (SidePool("state", 5008), POOLS[1]),
            "bytes of an item of state differs: prefill has 5000, decode has 5008",
        ),
    ],
)
def test_workers_that_keep_other_things_do_not_fit(pools: tuple[SidePool, ...], message: str) -> None:
    mine, theirs = (layout_of(args, backend="sim") for args in (BOTH, replace(ARGS, pools=pools)))
    conflict = layout_conflict(mine, theirs, me="prefill", them="decode")
    assert conflict is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(conflict)


def region(item_bytes: int, *extents: tuple[int, int, int]) -> tuple[RankMemory, ...]:
    window = SideMemory(Region(1 << 41, 16, item_bytes, None), tuple(Extent(*extent) for extent in extents))
    return (RankMemory(ARGS.kv, 0, 1, 0, 1, pools=(beside(STATES)[0].pools[0], window)),)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (beside(), "decode's rank 0 names the memory of 0 pools, its layout has 2"),
        (beside(STATES, STATES), "has bytes up to 5000, which is more than the 512 of window 8"),
        (beside(STATES, Region((1 << 40) + 64, 16, 512, None)), "overlap"),
        (beside(STATES, Region((1 << 64) - 64, 16, 512, None)), "does not fit into an address space"),
        (region(500, (0, 0, 512)), "has items of 500 bytes, and an extent that ends at 512, of window 8"),
        (region(512, (0, 0, 500)), "none of decode's 1 ranks has byte 500 of window 8"),
        (region(512, (0, 0, 100), (120, 100, 392)), "none of decode's 1 ranks has byte 100 of window 8"),
        (region(612, (0, 0, 512), (0, 512, 100)), "has bytes twice or in another order of window 8"),
    ],
)
def test_a_registration_with_other_memory_is_refused(ranks: tuple[RankMemory, ...], message: str) -> None:
    core = prefill_core(BOTH)
    core.on_message("link", Register("d", "p", layout_of(BOTH, backend=CAPS.name), ranks, BOTH.aux), 0.0)
    assert message in core.effects.queue[-1].message.reason


def test_an_engine_reaches_all_memory() -> None:
    assert CAPS.carried(BOTH) == [ARGS.kv, ARGS.aux, STATES, WINDOW]
    assert replace(CAPS, carries_host_memory=False).carried(BOTH) == [ARGS.kv, STATES, WINDOW]
