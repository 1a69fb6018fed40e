"""Both ends of a pipeline stage: what its steps begin from, and where their hidden states go."""

from torch import Tensor

from engine.parallel.stage_link import HiddenStates


class StageInput:
    """The hidden states that the stage before has computed for the same step, in the place of its tokens."""

    def __init__(self, link: HiddenStates) -> None:
        self._link = link

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Wait for the [T, hidden] of a step's T tokens. Raises RanksEnded."""
        return self._link.receive(len(token_ids))
