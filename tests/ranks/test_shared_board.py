"""The board of DP ranks in shared memory: what one writes the others read, whole, and none of it wakes its writer."""

from contextlib import closing
from functools import partial

import pytest

from disagg.processes.joint_memory import joint_plan
from disagg.processes.rank_group import _late_hosts
from engine.config import EngineConfig
from engine.core.dp_agreement import PromptGate
from engine.core.dp_step import Row
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import BOARD_ROWS, RegionPlan
from engine.ranks.followers import Followers
from engine.ranks.links import Joint
from engine.ranks.shared_board import SharedBoard


@pytest.fixture
def woken() -> list[int]:
    return []


@pytest.fixture
def boards(woken: list[int]) -> list[SharedBoard]:
    """Of three DP ranks, each over a mapping of its own."""
    plan = RegionPlan(ranks=6, dp_ranks=3)
    first = SharedRegion.create(plan)
    assert first.descriptor is not None
    regions = [first, *(SharedRegion.open(first.descriptor, plan) for _ in range(2))]
    first.close()
    wakes = {rank: lambda rank=rank: woken.append(rank) for rank in range(3)}
    return [SharedBoard(region, rank=rank, wakes=wakes) for rank, region in enumerate(regions)]


def test_a_row_is_there_for_all_once_it_is_posted(boards: list[SharedBoard], woken: list[int]) -> None:
    assert boards[0].row(1, 0) is None and boards[0].last_step(1) == -1 and not woken
    rows = [
        Row(step=0, idle=False, tokens=70_000, extend=True, prefillable=True, running=7, waiting=4096),
        Row(step=1, idle=True, can_graph=False),
    ]
    for row in rows:
        boards[1].post(1, row)
    for board in boards:
        assert [board.row(1, step) for step in range(3)] == [*rows, None]
        assert board.last_step(1) == 1 and board.row(0, 0) is None
    assert woken == [0, 2, 0, 2]


def test_rows_come_in_order_and_old_ones_are_gone(boards: list[SharedBoard]) -> None:
    for step in range(BOARD_ROWS + 1):
        boards[2].post(2, Row(step=step, idle=True))
    assert boards[0].row(2, 1) == Row(step=1, idle=True)
    with pytest.raises(AssertionError, match="row 0 of DP rank 2 is overwritten by row 16"):
        boards[0].row(2, 0)
    for step in (BOARD_ROWS, BOARD_ROWS + 2):
        with pytest.raises(AssertionError):
            boards[2].post(2, Row(step=step, idle=True))
    with pytest.raises(AssertionError):
        boards[0].post(2, Row(step=BOARD_ROWS + 1, idle=True))


def test_the_gate_and_the_votes_are_one_number_each(boards: list[SharedBoard], woken: list[int]) -> None:
    assert boards[2].gate() == PromptGate() and boards[2].voted(1) == 0
    for gate in (PromptGate(False, 5), PromptGate(True, 9)):
        boards[0].set_gate(gate)
        assert boards[2].gate() == gate
    with pytest.raises(AssertionError):
        boards[1].set_gate(PromptGate(False, 11))
    assert not woken
    boards[1].vote(1, 6)
    assert boards[0].voted(1) == 6 and boards[0].voted(2) == 0 and woken == [0, 2]


def test_a_hanging_dp_rank_is_named_by_the_row_that_it_did_not_post() -> None:
    config = EngineConfig(model_path="", tp_size=4, dp_size=2, enable_dp_attention=True)
    with closing(SharedRegion.create(joint_plan(config))) as region:
        boards = [SharedBoard(region, rank=rank, wakes={}) for rank in range(2)]
        followers = Followers({}, on_end=lambda text, refused: None)
        late = partial(_late_hosts, followers, config, Joint(region, 0))
        boards[0].post(0, Row(step=0, idle=False))
        assert late() == [2], "the first rank of the second DP rank"
        boards[1].post(1, Row(step=0, idle=True))
        assert late() == [0, 1, 2, 3], "sums that wait look alike"
