"""The last token of each slot, in memory that all ranks of a group share: the leader samples, its followers read.

A follower reads behind a count of the sampled steps. The leader overwrites a row only in a later step, whose logits need every
follower, so no row changes before it is read.
"""

from torch import Tensor

from engine.executor.future_map import FutureMap
from engine.parallel.shared_tokens import SharedTokens


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
        self._sampled = 0  # steps before the present one that sampled

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Wait for the leader's samples if one is needed."""
        if bool((token_ids < 0).any()):
            self._shared.wait(self._sampled)
        return super().resolve(token_ids)

    def on_sampled(self) -> None:
        """Note that the leader samples the step that has just run."""
        self._sampled += 1

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        raise AssertionError("a follower samples nothing")
