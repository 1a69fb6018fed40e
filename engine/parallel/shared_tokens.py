"""The future map's tokens for the other ranks: the leader draws and writes, followers read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.parallel.region import SharedRegion


class SharedTokens:
    """`row` [slots] int64: the last token of each slot. `count`: how many times the leader has published.

    `sampled`: on a follower, how many steps before the present one sampled; it counts on from steps that were measured.

    The leader writes a slot again only when no step that reads it is still to run: a token needs the step that read the last one.
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
        """Write `tokens` into their slots and return the new count. For the leader alone."""
        self.row[torch.as_tensor(slots, dtype=torch.int64)] = torch.as_tensor(tokens, dtype=torch.int64)
        count = self.count + 1
        self._region.publish(self._count, count)
        return count

    def wait(self, count: int) -> None:
        """Return when the leader has published `count` times. Raises RanksEnded."""
        self._region.wait(self._count, count)
