"""Last token of each slot on the device, unknown to the host.

Inputs may contain placeholders -(slot + 1), resolved before the forward; sampled tokens are stored.
FIFO order is the only synchronization. After SGLang's FutureMap.
"""

from typing import Protocol

import torch
from torch import Tensor


class StepInputs(Protocol):
    """Inputs of steps: tokens, or a later stage's hidden states.

    Recorded steps reuse memory: `fill` writes it before each replay, `recorded` reads it inside.
    """

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Return input for `DenseDecoder.begin` from ids or placeholders [T]."""

    def fill(self, rows: int) -> None:
        """Prepare a replay with `rows` valid rows."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        """`resolve` inside a recorded step, with padding."""


class FutureMap:
    """Future map in `last` int64[slots + 1]; padding stores in the extra cell."""

    def __init__(self, last: Tensor) -> None:
        self._last = last

    @classmethod
    def on(cls, device: torch.device, *, num_slots: int) -> "FutureMap":
        return cls(torch.zeros(num_slots + 1, dtype=torch.int64, device=device))

    def resolve(self, token_ids: Tensor) -> Tensor:
        return torch.where(token_ids < 0, self._last[(-token_ids - 1).clamp_min(0)], token_ids)

    def fill(self, rows: int) -> None:
        """Do nothing: recorded ids are inputs."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        return self.resolve(token_ids)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Store sampled tokens; both int64[n]."""
        self._last[slots] = tokens

    def on_sampled(self) -> None:
        """Share stored tokens, in maps over ranks."""
