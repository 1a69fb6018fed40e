"""Both ends of a pipeline stage: what its steps begin from, and where their hidden states go."""

import torch
from torch import Tensor

from engine.parallel.stage_link import HiddenStates


class StageInput:
    """The hidden states that the stage before has computed for the same step, in the place of its tokens.

    `room` [rows, hidden]: where recorded steps read them. The link is no part of a graph: neighbours need not pad alike.
    """

    def __init__(self, link: HiddenStates, *, room: Tensor | None = None) -> None:
        self._link = link
        self._room = torch.empty(0) if room is None else room

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Wait for the [T, hidden] of a step's T tokens. Raises RanksEnded."""
        return self._link.receive(len(token_ids))

    def fill(self, rows: int) -> None:
        self._room[:rows].copy_(self._link.receive(rows))

    def recorded(self, token_ids: Tensor) -> Tensor:
        """A copy: layers change what they begin from, and padded rows shall not grow from replay to replay."""
        return self._room[: len(token_ids)].clone()
