"""A follower alone: it runs each step once, in order, and ends where one is missing."""

from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.core.plan import PageCopy, Plan
from engine.ranks.follower import Follower, LostStep
from engine.ranks.messages import Done, follower_end, leader_end, step_of
from service.process.message_stream import socket_pair


@dataclass
class Ran:
    """In place of a RankRunner."""

    seqs: list[int] = field(default_factory=list)

    def run(self, plan: Plan) -> None:
        self.seqs.append(plan.seq)


def steps(*seqs: int) -> list[Any]:
    return [step_of(Plan(seq=seq, extend=False, items=[])) for seq in seqs]


@pytest.mark.parametrize(
    ("seqs", "before", "after"),
    [((1, 2, 4), 2, 4), ((2,), 0, 2), ((1, 1), 1, 1), ((1, 2, 3, 2), 3, 2)],
    ids=["lost", "lost at the start", "doubled", "late"],
)
def test_a_step_that_is_missing_ends_the_rank_by_number(seqs: tuple[int, ...], before: int, after: int) -> None:
    own, theirs = socket_pair()
    runner: Any = Ran()
    with closing(leader_end(own)), closing(follower_end(theirs.detach())) as channel:
        follower = Follower(channel, runner, readers={}, actions={}, turning=lambda _: None)
        *good, bad = steps(*seqs)
        for step in good:
            follower.handle(step)
        with pytest.raises(LostStep, match=f"step {after} comes after step {before}"):
            follower.handle(bad)
    assert runner.seqs == list(seqs[:-1]), "the bad step is not run"


def test_steps_of_the_warm_up_have_no_number() -> None:
    own, theirs = socket_pair()
    runner: Any = Ran()
    with closing(leader_end(own)), closing(follower_end(theirs.detach())) as channel:
        follower = Follower(channel, runner, readers={}, actions={}, turning=lambda _: None)
        for step in steps(0, 0, 1, 2):
            follower.handle(step)
    assert runner.seqs == [0, 0, 1, 2]


def test_copies_alone_are_answered_once_they_are_made() -> None:
    own, theirs = socket_pair()
    runner: Any = Ran()
    with closing(leader_end(own)) as leader, closing(follower_end(theirs.detach())) as channel:
        follower = Follower(channel, runner, readers={}, actions={}, turning=lambda _: None)
        follower.handle(step_of(Plan(seq=1, extend=False, items=[], to_host=[PageCopy(1, 2)]), answer=5))
        assert runner.seqs == [1] and leader.receive() == Done(5)
