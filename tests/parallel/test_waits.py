"""Tokens of the leader, hidden states from stage to stage, and the abort word that ends every wait."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from engine.kernels.allreduce import allreduce
from engine.kernels.build import RanksEnded
from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.region import SharedRegion, SharedTokens, late_ranks
from engine.parallel.region_plan import RegionPlan
from engine.parallel.stage_link import StageLink
from engine.ranks.links import FollowerFutureMap
from tests.parallel.ranks_in_threads import opened, together
from tests.parallel.test_sums import without_c

PLAN = RegionPlan(ranks=2, stages=2, slots=8, hidden=16, link_rows=3, link_depth=2, logits_rows=2, vocab=32, window=64)
LONG_WAIT_S = 0.3


@pytest.fixture(params=["c", "torch"] if allreduce() is not None else ["torch"])
def regions(request: pytest.FixtureRequest) -> Iterator[list[SharedRegion]]:
    """Four mappings of one memory, whose waits are C's or Python's."""
    with without_c() if request.param == "torch" else contextlib.nullcontext(), opened(PLAN, 4) as regions:
        yield regions


def link(region: SharedRegion, *, rank: int = 0, dtype: torch.dtype = torch.bfloat16) -> StageLink:
    return StageLink(region, stage=0, rank=rank, dtype=dtype)


def test_a_follower_reads_tokens_after_their_count(regions: list[SharedRegion]) -> None:
    leader, follower = SharedTokens(regions[0]), SharedTokens(regions[1])
    taken = threading.Semaphore(0)

    def lead() -> None:
        for step in range(1, 6):
            assert leader.publish([1, 4, 7], [step, 10 * step, 100 * step]) == step
            taken.acquire()

    def follow() -> list[list[int]]:
        seen = []
        for step in range(1, 6):
            follower.wait(step)
            seen.append(follower.row.tolist())
            taken.release()
        return seen

    _, seen = together([lead, follow], region=regions[0])
    assert seen == [[0, step, 0, 0, 10 * step, 0, 0, 100 * step] for step in range(1, 6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hidden_states_arrive_in_order_on_each_rank(regions: list[SharedRegion], dtype: torch.dtype) -> None:
    """Tensors of less than a slot, of one, and of more than all slots together hold."""
    sizes = [1, 3, 2, 20, 3, 7, 0, 1]
    sent = [torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)).to(dtype) for rows in sizes]

    def send(rank: int) -> list[torch.Tensor]:
        to = link(regions[rank], rank=rank, dtype=dtype)
        for x in sent:
            to.send(x + rank)
        return []

    def receive(rank: int) -> list[torch.Tensor]:
        of = link(regions[2 + rank], rank=rank, dtype=dtype)
        return [of.receive(rows) for rows in sizes]

    works = [partial(work, rank) for work in (send, receive) for rank in (0, 1)]
    *_, first, second = together(works, region=regions[0])
    assert all(torch.equal(got, x) for got, x in zip(first, sent, strict=True))
    assert all(torch.equal(got, x + 1) for got, x in zip(second, sent, strict=True))


def test_a_sender_is_no_more_than_the_slots_ahead(regions: list[SharedRegion]) -> None:
    sender, receiver = link(regions[0]), link(regions[1])
    events: list[str] = []

    def send() -> None:
        for number in range(3):
            sender.send(torch.full((1, 16), float(number)))
            events.append(f"sent {number}")

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: len(events) == 2)
    thread.join(0.05)  # whatever it takes: the third has no slot
    assert events == ["sent 0", "sent 1"]
    assert [float(receiver.receive(1)[0, 0]) for _ in range(3)] == [0.0, 1.0, 2.0]
    thread.join()
    assert events[2] == "sent 2"


def test_a_follower_counts_on_from_steps_that_it_measured(regions: list[SharedRegion]) -> None:
    """What serves has a map of its own, and waits for the tokens behind those of the measured steps."""
    leader, shared = SharedTokens(regions[0]), SharedTokens(regions[1])
    FollowerFutureMap(shared).on_sampled()
    serves = FollowerFutureMap(shared)
    regions[2].abort()
    with pytest.raises(RanksEnded):
        serves.resolve(torch.tensor([-1]))
    leader.publish([0], [7])
    assert serves.resolve(torch.tensor([-1, 3])).tolist() == [7, 3]


WAITS: dict[str, Callable[[SharedRegion], object]] = {
    "tokens": lambda region: SharedTokens(region).wait(1),
    "receive": lambda region: link(region).receive(1),
    "send": lambda region: link(region).send(torch.zeros(9, 16)),
    "sum": lambda region: SharedMemoryCollectives(region, rank=0).sum(torch.zeros(1, 16), dtype=torch.float32),
    "gather of the leader": lambda region: SharedMemoryCollectives(region, rank=0).gather_columns(
        torch.zeros(1, 16), columns=range(16), total=32
    ),
    "gather of another": lambda region: SharedMemoryCollectives(region, rank=1).gather_columns(
        torch.zeros(1, 16), columns=range(16, 32), total=32
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_abort_ends_a_wait_and_all_later_ones(regions: list[SharedRegion], wait: str) -> None:
    waiting = threading.Event()
    ended: list[BaseException] = []

    def run() -> None:
        waiting.set()
        try:
            WAITS[wait](regions[0])
        except RanksEnded as e:
            ended.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    waiting.wait()
    assert not regions[0].aborted
    regions[1].abort()
    thread.join(10)
    assert len(ended) == 1 and regions[0].aborted
    with pytest.raises(RanksEnded):
        regions[2].wait(regions[2].word(PLAN.tokens_count), 1)


def test_a_long_wait_costs_no_core(regions: list[SharedRegion]) -> None:
    """CPU time of the thread itself while it waits for an event that is far away."""
    used_s: list[float] = []
    tokens = SharedTokens(regions[0])

    def run() -> None:
        before_s = time.thread_time()
        tokens.wait(1)
        used_s.append(time.thread_time() - before_s)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG_WAIT_S)
    SharedTokens(regions[1]).publish([0], [1])
    thread.join()
    assert used_s[0] < LONG_WAIT_S / 10


@pytest.mark.skipif(allreduce() is None, reason="no compiler")
def test_ranks_that_share_a_core_give_it_to_one_another() -> None:
    """Four on one core take twice the CPU of the barrier of Python, which sleeps at once; fifteen times where a wait only spins."""
    sums, cores = 400, os.sched_getaffinity(0)
    barrier = threading.Barrier(4)

    def used_s(wait: Callable[[], object]) -> float:
        os.sched_setaffinity(0, {min(cores)})  # of this thread alone
        before_s = time.thread_time()
        for _ in range(sums):
            wait()
        return time.thread_time() - before_s

    with opened(RegionPlan(ranks=4), 4) as regions:
        ranks = [SharedMemoryCollectives(region, rank=rank) for rank, region in enumerate(regions)]
        waits = [partial(rank.sum, torch.ones(1, 64), dtype=torch.float32) for rank in ranks]
        ours = together([partial(used_s, wait) for wait in waits], region=regions[0])
        barriers = together([partial(used_s, barrier.wait)] * 4, region=regions[0])
    assert sum(ours) < 5 * sum(barriers)


def until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_who_is_late_is_read_off_the_memory(regions: list[SharedRegion]) -> None:
    """Ranks 0 and 1 are a stage, 2 and 3 the next."""
    sums = [SharedMemoryCollectives(regions[rank], rank=rank % 2, stage=rank // 2) for rank in range(4)]
    x = torch.ones(1, 16)

    def late_in(*works: Callable[[], object], until: list[int]) -> None:
        """`works` wait for the late ones until the group ends."""
        threads = [threading.Thread(target=_until_ended, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + 10.0
        while (found := late_ranks(regions[0])) != until:
            assert time.monotonic() < deadline_s, found
        regions[0].abort()
        for thread in threads:
            thread.join()

    assert late_ranks(regions[0]) == [0, 1], "the first stage has not begun, and the second has all of it"
    together([partial(one.sum, x, dtype=torch.float32) for one in sums[:2]], region=regions[0])
    for rank in range(2):
        link(regions[rank], rank=rank).send(torch.ones(1, 16, dtype=torch.bfloat16))
    assert late_ranks(regions[0]) == [2, 3], "has not taken what was sent"
    late_in(partial(sums[3].sum, x, dtype=torch.float32), until=[2])


def _until_ended(work: Callable[[], object]) -> None:
    with contextlib.suppress(RanksEnded):
        work()
