"""Experts move between ranks: all take a placement in one step, none before all have read, and each round looks at its own loads."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.expert_balance import ExpertBalance
from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.expert_placement import Placement, imbalance, trivial
from engine.parallel.region_plan import RegionPlan
from tests.parallel.ranks_in_threads import run_ranks

RANKS = RegionPlan(ranks=2)
EVERY, EXPERTS = 4, 8
MOST_TURNS = 20_000  # until a thread has read
LATE_TURNS = 12


class Held(NamedTuple):
    placement: Placement


class Layer:
    """One rank's experts, which are read as soon as `may_read`."""

    def __init__(self) -> None:
        self.loads: Tensor = torch.zeros(EXPERTS, dtype=torch.int64)
        self.placed = Held(trivial(EXPERTS, slots=EXPERTS))
        self.may_read = threading.Event()
        self.may_read.set()

    def moved(self, placement: Placement) -> Held:
        assert self.may_read.wait(timeout=30.0)
        return Held(placement)

    def take(self, moved: Held) -> None:
        self.placed = moved


class Rank:
    def __init__(self, collectives: SharedMemoryCollectives) -> None:
        self.layer = Layer()
        self._balance = ExpertBalance(collectives, every=EVERY, groups=1, nodes=1)
        self._balance.add(self.layer)

    def serve(self, hot: dict[int, int], *, late: bool = False) -> int:
        """Send tokens to the `hot` experts; return the turn after which the placement is another. `late`: read only some turns later."""
        for expert, tokens in hot.items():
            self.layer.loads[expert] += tokens
        if late:
            self.layer.may_read.clear()
        before = self.layer.placed
        for number in range(MOST_TURNS):
            if number == LATE_TURNS:
                self.layer.may_read.set()
            self._balance.on_step()
            if self.layer.placed is not before:
                return number
        return -1


def test_no_rank_takes_a_placement_before_all_have_read_it() -> None:
    """The second rank reads late; the first has read long before, and waits for its vote."""

    def work(collectives: SharedMemoryCollectives) -> tuple[int, Placement]:
        own = Rank(collectives)
        turn = own.serve({0: 1000, 1: 900}, late=collectives.rank == 1)
        return turn, own.layer.placed.placement

    (first, placement), (second, other) = run_ranks(RANKS, work)
    assert first == second >= LATE_TURNS and placement == other
    assert imbalance(placement, [1000, 900, *[0] * 6], ranks=2) < 1.1


def test_a_round_looks_at_the_loads_since_the_last_one() -> None:
    """What was hot at first is not any more, although it is the most in sum."""
    later = {5: 60, 6: 50}

    def work(collectives: SharedMemoryCollectives) -> tuple[Placement, Placement]:
        own = Rank(collectives)
        own.serve({0: 1000, 1: 900})
        at_first = own.layer.placed.placement
        own.serve(later)
        return at_first, own.layer.placed.placement

    loads = [later.get(expert, 0) for expert in range(EXPERTS)]
    for at_first, then in run_ranks(RANKS, work):
        assert imbalance(at_first, loads, ranks=2) == 2.0 and imbalance(then, loads, ranks=2) < 1.2


def test_a_stage_of_dense_layers_moves_nothing() -> None:
    def work(collectives: SharedMemoryCollectives) -> int:
        balance = ExpertBalance(collectives, every=1, groups=1, nodes=1)
        for _ in range(3):
            balance.on_step()
        return balance.rounds

    assert run_ranks(RANKS, work) == [0, 0]
