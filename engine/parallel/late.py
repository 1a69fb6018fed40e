"""Which ranks of a group the others wait for, read off the words of their shared memory."""

import torch

from engine.parallel.region import SharedRegion


def late_ranks(region: SharedRegion) -> list[int]:
    """Return the ranks, numbered stage by stage, that have handed over less than others wait for, or a stage that has all it needs.

    A rank that computes is late, too: call it once a step takes too long.
    """
    plan = region.plan
    for stage in reversed(range(plan.stages)):
        first = stage * plan.ranks
        for lines in (plan.sum_lines(stage), plan.gather_lines(stage)):
            counts = region.tensor(lines, (plan.ranks, 8), torch.int64)[:, 0].tolist()
            if behind := [first + i for i, count in enumerate(counts) if count < max(counts)]:
                return behind
        if stage == 0 or any(_waiting(region, stage - 1, rank) for rank in range(plan.ranks)):
            return list(range(first, first + plan.ranks))
    raise AssertionError("the first stage ends the loop")


def ranks_without_row(region: SharedRegion) -> list[int]:
    """Return the DP ranks that have not posted a row that others have (engine/ranks/shared_board.py)."""
    plan = region.plan
    posted = [region.read(region.word(plan.board_lines(rank))) for rank in range(plan.dp_ranks)]
    return [rank for rank, count in enumerate(posted) if count < max(posted)]


def _waiting(region: SharedRegion, stage: int, rank: int) -> bool:
    """Whether hidden states wait to be taken from `stage`."""
    sent, taken = region.tensor(region.plan.link_lines(stage, rank), (2, 8), torch.int64)[:, 0].tolist()
    return bool(sent > taken)
