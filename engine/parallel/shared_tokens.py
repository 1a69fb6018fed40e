"""Future map's tokens for other ranks: the leader writes, followers read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.parallel.region import SharedRegion


class SharedTokens:
    """Last token per slot (`row` int64), and the leader's `count` of publications.

    `sampled`: sampled steps so far, on a follower. The leader overwrites a slot only after the
    steps that read it: a token needs the step that read the previous one.
    """

    def __init__(self, region: SharedRegion) -> None:
        self._region = region
        self.sampled = 0
        self._count = region.word(region.plan.tokens_count)
        self.row = region.tensor(region.plan.tokens, (region.plan.slots,), torch.int64)

    @property
    def count(self) -> int:
        return int(self._count.item())

    def publish(self, slots: Tensor | Sequence[int], tokens: Tensor | Sequence[int]) -> int:
        """Write tokens; return the new count. Leader only."""
        self.row[torch.as_tensor(slots, dtype=torch.int64)] = torch.as_tensor(tokens, dtype=torch.int64)
        count = self.count + 1
        self._region.publish(self._count, count)
        return count

    def wait(self, count: int) -> None:
        """Raises RanksEnded."""
        self._region.wait(self._count, count)
