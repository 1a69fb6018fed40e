"""DP attention: rows by which ranks agree on a step (engine/core/dp_agreement.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

import msgspec

DECIDES = 0  # rank that sets the gate for prompts


class Padding(Enum):
    """Token exchange: MAX_LEN pads to the maximum (all-gather), SUM_LEN joins (all-reduce)."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rank's part of a step; an `idle` one joins for others.

    `drafts`: some rows verify drafts. `prefillable`: prompts wait.
    """

    step: int
    idle: bool
    tokens: int = 0
    extend: bool = False
    can_graph: bool = True
    drafts: bool = False
    prefillable: bool = False
    running: int = 0
    waiting: int = 0


class AgreedStep(msgspec.Struct, frozen=True, array_like=True):
    """Step of all ranks: padded `tokens` per rank; all replay a `graph` or none does."""

    step: int
    tokens: tuple[int, ...]
    padding: Padding
    extend: bool
    graph: bool
    drafts: bool = False


def agree(rows: Sequence[Row]) -> AgreedStep:
    """The step of all ranks, without SGLang's rounding for a reduce-scatter."""
    step = rows[0].step
    assert all(row.step == step for row in rows) and not all(row.idle for row in rows)
    extend = any(row.extend for row in rows)
    tokens = [row.tokens for row in rows]
    padding = padding_of(tokens, extend=extend)
    if padding is Padding.MAX_LEN:
        tokens = [max(tokens)] * len(rows)
    return AgreedStep(
        step=step,
        tokens=tuple(tokens),
        padding=padding,
        extend=extend,
        graph=not extend and all(row.can_graph for row in rows),
        drafts=any(row.drafts for row in rows),
    )


def padding_of(tokens: Sequence[int], *, extend: bool) -> Padding:
    """Choose fewer bytes, as SGLang's DpPaddingMode."""
    if not extend and 2 * sum(tokens) > max(tokens) * len(tokens):
        return Padding.MAX_LEN
    return Padding.SUM_LEN


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
    """One rank's side: new weights on all ranks between the same two steps, or on none.

      read, drained: READY --all ready--> takes them: TAKEN --all taken--> computes again
      cannot: REFUSED -----> ready ranks refuse, too

    All ranks get the same numbered updates. A ready rank plans no items until all have taken the
    new weights, so no step with tokens mixes weights. Meanwhile it joins other ranks' steps.
    """

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


class PrefillDelayer:
    """Admits prompts when all ranks have one, or none runs anything. After SGLang's PrefillDelayer.

    Others wait up to `max_delay_passes` - 1 steps. Without prompts the gate is closed, or the next
    would enter by itself. One rank's prompt slows all ranks' decodes; DP rank 0 decides after each
    step.
    """

    def __init__(self, *, max_delay_passes: int = 30) -> None:
        self._most = max_delay_passes - 1
        self._delayed = 0

    def allows(self, rows: Sequence[Row]) -> bool:
        """True if prompts may enter after this step; call once per step."""
        waiting = [row for row in rows if row.prefillable]
        enough = len(waiting) == len(rows) or not any(row.running for row in rows)
        allows = bool(waiting) and (enough or self._delayed >= self._most)
        self._delayed = self._delayed + 1 if waiting and not allows else 0
        return allows
