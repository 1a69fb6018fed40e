"""Machines: regions whose ranks meet over loopback. The bits are those of one machine."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from engine.kernels.build import RanksEnded
from engine.parallel import rendezvous
from engine.parallel.collectives import columns_of
from engine.parallel.network import NetworkCollectives, RankConnection
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from engine.parallel.rendezvous import RendezvousError, dial, listen
from tests.parallel.ranks_in_threads import opened, together
from tests.parallel.test_sums import one_by_one, partials_of

T = TypeVar("T")
SECRET = b"a secret of the cluster"


def meet(group: str) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen, server, secret=SECRET, group=group, within_s=60)
        there = dial("127.0.0.1", server.getsockname()[1], secret=SECRET, group=group, within_s=60)
        return listening.result(), there


@contextlib.contextmanager
def machines(
    here: int, plan: RegionPlan, *, rounds: int = 1
) -> Iterator[tuple[list[NetworkCollectives], list[SharedRegion]]]:
    """Ranks in order, and a region of each of 2 ** rounds machines."""
    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(opened(plan, here)) for _ in range(1 << rounds)]
        flat = [region for machine in regions for region in machine]
        others: list[list[RankConnection]] = [[] for _ in flat]
        for apart in (here << number for number in range(rounds)):
            for rank in (rank for rank in range(len(flat)) if not rank & apart):
                for end, connection in zip((rank, rank | apart), meet(f"rank {rank}"), strict=True):
                    others[end].append(RankConnection(connection, flat[end]))
                    stack.callback(connection.close)
        yield (
            [
                NetworkCollectives(region, local_rank=rank % here, machine=rank // here, others=others[rank])
                for rank, region in enumerate(flat)
            ],
            [machine[0] for machine in regions],
        )


def run(ranks: list[NetworkCollectives], work: Callable[[NetworkCollectives], T], region: SharedRegion) -> list[T]:
    return together([partial(work, rank) for rank in ranks], region=region)


@pytest.mark.parametrize(("here", "rounds"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_bits_are_those_of_one_machine(here: int, rounds: int) -> None:
    """Of tensors smaller than the ranks are many, and of some that no socket takes at once."""
    sizes = [(1, 1), (3, 40), (0, 8), (300, 5000)]
    size = here << rounds
    steps = [partials_of(size, *shape) for shape in sizes]
    steps.append([torch.full((2, 9), -0.0)] * size)

    def work(rank: NetworkCollectives) -> list[Tensor]:
        return [rank.sum(partials[rank.rank], dtype=torch.bfloat16) for partials in steps]

    with machines(here, RegionPlan(ranks=here), rounds=rounds) as (ranks, regions):
        assert [rank.rank for rank in ranks] == list(range(size))
        for seen in run(ranks, work, regions[0]):
            for partials, total in zip(steps, seen, strict=True):
                expected = one_by_one(partials, torch.bfloat16)
                assert torch.equal(total.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("rounds", [1, 2])
def test_logits_of_all_machines_are_gathered(rounds: int) -> None:
    steps = [torch.randn(rows, 22) for rows in (2, 3, 1)]

    def work(rank: NetworkCollectives) -> list[Tensor]:
        seen = []
        for whole in steps:
            mine = columns_of(rank.rank, rank.size, 22)
            got = rank.gather_columns(whole[:, mine.start : mine.stop].contiguous(), columns=mine, total=22)
            seen += [] if got is None else [got.clone()]
        return seen

    with machines(2, RegionPlan(ranks=2, logits_rows=3, vocab=22), rounds=rounds) as (ranks, regions):
        leader, *others = run(ranks, work, regions[0])
    assert all(torch.equal(got, whole) for got, whole in zip(leader, steps, strict=True))
    assert others == [[]] * (len(ranks) - 1)


@pytest.mark.parametrize(("here", "rounds"), [(1, 1), (2, 1), (2, 2), (1, 3)])
def test_what_one_rank_has_is_on_all_of_every_machine(here: int, rounds: int) -> None:
    shared = [torch.randn(300, 500).to(torch.bfloat16) for _ in range(here << rounds)]

    def work(rank: NetworkCollectives) -> list[Tensor]:
        seen = [x.clone() if owner == rank.rank else torch.zeros_like(x) for owner, x in enumerate(shared)]
        for owner, x in enumerate(seen):
            rank.share(x, owner=owner)
        return seen

    with machines(here, RegionPlan(ranks=here), rounds=rounds) as (ranks, regions):
        for seen in run(ranks, work, regions[0]):
            assert all(torch.equal(x, wanted) for x, wanted in zip(seen, shared, strict=True))


def test_a_machine_that_goes_ends_the_ranks_of_the_other() -> None:
    """Rank 3 closes; rank 1, which exchanges with it, ends the wait of rank 0, too."""
    with machines(2, RegionPlan(ranks=2)) as (ranks, regions):

        def work(rank: NetworkCollectives) -> None:
            if rank.rank == 3:
                rank.close()
                return
            with pytest.raises(RanksEnded):
                rank.sum(torch.zeros(2, 2), dtype=torch.float32)
            regions[1].abort()  # as machine 1's leader does, whose rank 3 has ended

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, ranks))
        assert regions[0].aborted


def test_machines_that_exchange_different_sizes_are_out_of_step() -> None:
    with machines(1, RegionPlan(ranks=1)) as (ranks, regions):

        def work(rank: NetworkCollectives) -> None:
            rank.sum(torch.zeros(2 + rank.rank, 16), dtype=torch.float32)

        with pytest.raises(RuntimeError, match="ranks are out of step"):
            run(ranks, work, regions[0])


@pytest.mark.parametrize(("secret", "group"), [(b"another secret", "g"), (SECRET, "another group")])
def test_strangers_are_refused_and_the_one_that_is_meant_comes_in(secret: bytes, group: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        listening = pool.submit(listen, server, secret=SECRET, group="g", within_s=60)
        with pytest.raises(RendezvousError, match=f"no rank of {group} answered at 127.0.0.1:{port} within"):
            dial("127.0.0.1", port, secret=secret, group=group, within_s=0.2)
        with socket.create_connection(("127.0.0.1", port)) as junk:
            junk.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
            with contextlib.suppress(OSError):  # it may be shown the door before
                junk.shutdown(socket.SHUT_WR)
        with dial("127.0.0.1", port, secret=SECRET, group="g", within_s=60), listening.result():
            pass


def test_a_stranger_that_says_nothing_does_not_keep_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PROOF_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        listening = pool.submit(listen, server, secret=SECRET, group="g", within_s=60)
        with (
            socket.create_connection(("127.0.0.1", port)),
            dial("127.0.0.1", port, secret=SECRET, group="g", within_s=60),
            listening.result(),
        ):
            pass


def test_a_rank_that_does_not_come_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=f"no rank of g came to {name} within 0 s"):
            listen(server, secret=SECRET, group="g", within_s=0.05)
