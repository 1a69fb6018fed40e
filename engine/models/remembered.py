"""What a recurrent layer remembers of a request: which part of the model's state is this rank's, and in a step where it lies."""

from collections.abc import Sequence

from engine.kv.held import HeldState
from engine.kv.state_pool import StateSpec
from engine.layers.recurrence import LayerStates, StepStates
from engine.parallel.layout import Cut


class Remembered:
    def __init__(self, channels: Sequence[Cut], heads: Cut, *, taps: int, head: tuple[int, int], dtype: str) -> None:
        """`channels`: of the convolution, whose parts lie one above the other. `head`: keys and values of one head's state."""
        held = HeldState(tuple(cut.taken for cut in channels), channels[0].total, heads.taken, heads.total)
        self.spec = StateSpec((sum(map(len, channels)), taps - 1), (len(heads), *head), dtype, held)
        self._now: tuple[StepStates, LayerStates] | None = None

    def use(self, step: StepStates, layer: int) -> None:
        """Remember requests there, as the `layer`-th of the recurrent ones."""
        self._now = step, step.of(layer)

    def now(self) -> tuple[StepStates, LayerStates]:
        """The step, and the layer's memory of all slots."""
        assert self._now is not None, "use() comes first"
        return self._now
