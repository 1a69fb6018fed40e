"""The last token of each slot on all ranks of a group: the leader samples, its followers need the token in the next step.

On CPUs it lies in memory that all ranks share. A follower reads behind a count of the sampled steps. The leader overwrites a row only
in a later step, whose logits need every follower, so no row changes before it is read.

On GPUs each rank has a map of its own, and the leader's goes to its stage behind each step that samples: all of it, some KB, so that
it needs no list of slots. Streams order it; no host waits. Stages have none to share: they plan no step before its tokens are known.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.executor.future_map import FutureMap
from engine.parallel.shared_tokens import SharedTokens
from engine.ranks.links import RankLinks


class LeaderFutureMap(FutureMap):
    def __init__(self, shared: SharedTokens) -> None:
        super().__init__(shared.row)
        self._shared = shared

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        self._shared.publish(slots, tokens)


class FollowerFutureMap(FutureMap):
    def __init__(self, shared: SharedTokens) -> None:
        super().__init__(shared.row)
        self._shared = shared

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Wait for the leader's samples if one is needed."""
        if bool((token_ids < 0).any()):
            self._shared.wait(self._shared.sampled)
        return super().resolve(token_ids)

    def on_sampled(self) -> None:
        """Note that the leader samples the step that has just run."""
        self._shared.sampled += 1

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        raise AssertionError("a follower samples nothing")


class SentFutureMap(FutureMap):
    """`share(x)`: let x be on all ranks what it is on the leader, in stream order."""

    def __init__(self, last: Tensor, share: Callable[[Tensor], None]) -> None:
        super().__init__(last)
        self._share = share

    def on_sampled(self) -> None:
        self._share(self._last)


def future_map_of(links: RankLinks, *, leads: bool, device: torch.device, num_slots: int) -> FutureMap:
    if links.tokens is not None:
        return LeaderFutureMap(links.tokens) if leads else FollowerFutureMap(links.tokens)
    if links.share is None:
        return FutureMap.on(device, num_slots=num_slots)
    return SentFutureMap(torch.zeros(num_slots + 1, dtype=torch.int64, device=device), links.share)
