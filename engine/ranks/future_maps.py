"""Future map over ranks: the leader samples, followers need the tokens in the next step.

On CPUs it is shared memory; followers wait for a count of sampled steps. The leader overwrites a
row in a later step only, whose logits need every follower. GPUs have copies, broadcast in stream
order. Pipeline stages plan with known tokens.
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
        if bool((token_ids < 0).any()):
            self._shared.wait(self._shared.sampled)
        return super().resolve(token_ids)

    def on_sampled(self) -> None:
        self._shared.sampled += 1

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        raise AssertionError("a follower samples nothing")


class SentFutureMap(FutureMap):
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
