"""Input of a pipeline stage."""

import torch
from torch import Tensor

from engine.parallel.stage_link import HiddenStates


class StageInput:
    """Hidden states of the previous stage, instead of tokens.

    `room` [rows, hidden]: input of recorded steps. The link is outside graphs: padding may differ.
    """

    def __init__(self, link: HiddenStates, *, room: Tensor | None = None) -> None:
        self._link = link
        self._room = torch.empty(0) if room is None else room

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Receive [T, hidden]. Raises RanksEnded."""
        return self._link.receive(len(token_ids))

    def fill(self, rows: int) -> None:
        self._room[:rows].copy_(self._link.receive(rows))

    def recorded(self, token_ids: Tensor) -> Tensor:
        """Copy the input: layers change it, and padded rows must not grow over replays."""
        return self._room[: len(token_ids)].clone()
