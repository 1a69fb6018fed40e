"""What steps begin from: the tokens themselves, or on a later pipeline stage the hidden states of the stage before."""

from typing import Protocol

from torch import Tensor


class StepInputs(Protocol):
    """A recorded step reads the same memory every time: `fill` writes it before each replay, `recorded` reads it within."""

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Return what `DenseDecoder.begin` takes, for the [T] token ids or placeholders of a step."""

    def fill(self, rows: int) -> None:
        """Prepare a replay of which the first `rows` rows are a step's."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        """As `resolve`, in a step that is recorded; `token_ids` with its padding."""
