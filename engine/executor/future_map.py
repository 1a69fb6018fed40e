"""Tokens that the host does not know yet: the last token of each slot, on the device.

A step's inputs may hold the placeholder -(slot + 1). The stream resolves it before the forward and stores the new token after
sampling, so the FIFO order of steps is all the synchronisation. After SGLang's FutureMap.
"""

from typing import Protocol

import torch
from torch import Tensor


class StepInputs(Protocol):
    """What steps begin from: the tokens, or on a later pipeline stage the hidden states of the stage before.

    A recorded step reads the same memory every time: `fill` writes it before each replay, `recorded` reads it within.
    """

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Return what `DenseDecoder.begin` takes, for the [T] token ids or placeholders of a step."""

    def fill(self, rows: int) -> None:
        """Prepare a replay of which the first `rows` rows are a step's."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        """As `resolve`, in a step that is recorded; `token_ids` with its padding."""


class FutureMap:
    """`last` [slots + 1] int64, zero: padded rows of a step store in the cell behind the slots."""

    def __init__(self, last: Tensor) -> None:
        self._last = last

    @classmethod
    def on(cls, device: torch.device, *, num_slots: int) -> "FutureMap":
        return cls(torch.zeros(num_slots + 1, dtype=torch.int64, device=device))

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Replace the placeholders among [T] token ids."""
        return torch.where(token_ids < 0, self._last[(-token_ids - 1).clamp_min(0)], token_ids)

    def fill(self, rows: int) -> None:
        """Do nothing before a recorded step: its ids are its own input."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        return self.resolve(token_ids)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Store the token that each slot just sampled; both [n] int64."""
        self._last[slots] = tokens

    def on_sampled(self) -> None:
        """Note that all tokens of a step are stored; a map of several ranks gives them to the others now."""
