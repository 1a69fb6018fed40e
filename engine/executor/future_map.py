"""Tokens that the host does not know yet: the last token of each slot, on the device.

A step's inputs may hold the placeholder -(slot + 1). The stream itself resolves it just before the forward and writes
the new token right after sampling, so the FIFO order of steps is all the synchronisation there is (SGLang's FutureMap).
"""

import torch
from torch import Tensor


class FutureMap:
    def __init__(self, *, num_slots: int, device: torch.device) -> None:
        self._last = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def resolve(self, token_ids: Tensor) -> Tensor:
        """[T] ids or placeholders -> [T] ids."""
        return torch.where(token_ids < 0, self._last[(-token_ids - 1).clamp_min(0)], token_ids)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """The token that each slot just sampled; both [n] int64."""
        self._last[slots] = tokens
