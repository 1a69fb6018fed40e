"""The state of a recurrent layer: this rank's part, and its slots."""

from collections.abc import Sequence

from torch import Tensor

from engine.kernels import tape
from engine.kv.held import HeldState
from engine.kv.state_pool import StateSpec
from engine.layers.linear import Linear
from engine.layers.norm import Normed
from engine.layers.recurrence import LayerStates, StepStates
from engine.parallel.layout import Cut


class Remembered:
    def __init__(self, channels: Sequence[Cut], heads: Cut, *, taps: int, head: tuple[int, int], dtype: str) -> None:
        """`channels`: parts of the convolution. `head`: keys and values of a state."""
        held = HeldState(tuple(cut.taken for cut in channels), channels[0].total, heads.taken, heads.total)
        self.spec = StateSpec((sum(map(len, channels)), taps - 1), (len(heads), *head), dtype, held)
        self._now: tuple[StepStates, LayerStates] | None = None
        self._number = 0

    def use(self, step: StepStates, layer: int) -> None:
        """Keep states there; `layer`: index among the recurrent layers."""
        self._now, self._number = (step, step.of(layer)), layer

    def now(self) -> tuple[StepStates, LayerStates]:
        assert self._now is not None, "use() comes first"
        return self._now

    def product(self, linear: Linear, norm: Normed, x: Tensor, delta: Tensor | None) -> Tensor:
        """linear.of_norm(norm, x, delta); with drafts keep it for `product_again`."""
        step, _ = self.now()
        if not step.keeps:
            return linear.of_norm(norm, x, delta)
        with tape.lasting():
            product = linear.of_norm(norm, x, delta)
        step.products[self._number] = product
        return product

    def product_again(self, rows: Tensor) -> Tensor:
        step, _ = self.now()
        return step.products[self._number][rows]
