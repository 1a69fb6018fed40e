"""DP attention: other weights, which all ranks take between the same two steps, or none takes.

    read, drained: READY --all are ready--> takes them: TAKEN --all have taken--> computes again
             cannot: REFUSED -----------> a rank that is ready refuses, too

A rank that is ready has no KV of the old weights and plans no items until all have taken the new ones, so no step with tokens lies
between the first rank's change and the last one's. Meanwhile it takes part in steps of ranks that are not ready yet.
"""

from enum import IntEnum
from typing import Protocol


class Vote(IntEnum):
    READY = 1
    REFUSED = 2
    TAKEN = 3


class VoteBoard(Protocol):
    """Memory that all ranks of a worker read. Each rank has one number there, 0 at first."""

    num_ranks: int

    def vote(self, rank: int, number: int) -> None:
        """Write the number of `rank`, and wake the other ranks' loops."""

    def voted(self, rank: int) -> int: ...


class UpdateAgreement:
    """One rank's side. Every rank gets the same updates, one after another; the number of one is its place among them."""

    def __init__(self, board: VoteBoard, *, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._update = 0
        self._own: Vote | None = None

    def begin(self) -> None:
        """Note that an update has come."""
        assert not self.holds
        self._update += 1
        self._own = None

    @property
    def holds(self) -> bool:
        """Whether this rank plans no items: it is ready, and some rank has not taken the weights yet."""
        if self._own is Vote.TAKEN and self._all_are(Vote.TAKEN):
            self._own = None
        return self._own in (Vote.READY, Vote.TAKEN)

    def all_ready(self) -> bool:
        """Note that this rank is ready; return whether all are: then it takes the weights at once."""
        if self._own is not Vote.READY:
            self._say(Vote.READY)
        return self._all_are(Vote.READY, Vote.TAKEN)

    def refused_by(self) -> int | None:
        """Return a rank that has refused the update."""
        return next((rank for rank in range(self._board.num_ranks) if self._vote_of(rank) is Vote.REFUSED), None)

    def taken(self) -> None:
        self._say(Vote.TAKEN)

    def refuse(self) -> None:
        assert self._own is not Vote.TAKEN
        self._say(Vote.REFUSED)

    def _say(self, vote: Vote) -> None:
        self._own = vote
        self._board.vote(self._rank, 4 * self._update + vote)

    def _vote_of(self, rank: int) -> Vote | None:
        """A rank that is further has taken this one, or all have refused it."""
        update, vote = divmod(self._board.voted(rank), 4)
        if update != self._update:
            return Vote.TAKEN if update > self._update else None
        return Vote(vote)

    def _all_are(self, *votes: Vote) -> bool:
        return all(self._vote_of(rank) in votes for rank in range(self._board.num_ranks))
