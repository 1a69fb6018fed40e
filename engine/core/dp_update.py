"""DP attention: new weights on all ranks between the same two steps, or on none.

  read, drained: READY --all ready--> takes them: TAKEN --all taken--> computes again
  cannot: REFUSED -----> ready ranks refuse, too

A ready rank plans no items until all have taken the new weights, so no step with tokens mixes
weights. Meanwhile it joins other ranks' steps.
"""

from enum import IntEnum
from typing import Protocol


class Vote(IntEnum):
    READY = 1
    REFUSED = 2
    TAKEN = 3


class VoteBoard(Protocol):
    """Memory shared by all ranks, one number per rank, initially 0."""

    num_ranks: int

    def vote(self, rank: int, number: int) -> None:
        """Write the rank's number, and wake the others."""

    def voted(self, rank: int) -> int: ...


class UpdateAgreement:
    """One rank's side; all ranks get the same numbered updates."""

    def __init__(self, board: VoteBoard, *, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._update = 0
        self._own: Vote | None = None

    def begin(self) -> None:
        assert not self.holds
        self._update += 1
        self._own = None

    @property
    def holds(self) -> bool:
        """This rank plans no items until all have taken the weights."""
        if self._own is Vote.TAKEN and self._all_are(Vote.TAKEN):
            self._own = None
        return self._own in (Vote.READY, Vote.TAKEN)

    def all_ready(self) -> bool:
        """Vote ready; return True if all are: take the weights at once."""
        if self._own is not Vote.READY:
            self._say(Vote.READY)
        return self._all_are(Vote.READY, Vote.TAKEN)

    def refused_by(self) -> int | None:
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
        """Vote on this update; a rank at a later one has taken it."""
        update, vote = divmod(self._board.voted(rank), 4)
        if update != self._update:
            return Vote.TAKEN if update > self._update else None
        return Vote(vote)

    def _all_are(self, *votes: Vote) -> bool:
        return all(self._vote_of(rank) in votes for rank in range(self._board.num_ranks))
