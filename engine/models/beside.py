"""Attention and Mamba2 beside one another in a layer (Falcon-H1): both read the same rows, and their answers are added."""

from torch import Tensor

from engine.layers.norm import NoNorm, Normed, add
from engine.layers.rope import Turn
from engine.models.attention import Attend, Attention
from engine.models.mamba import MambaMixer
from engine.parallel.collectives import Collectives
from engine.parallel.exchange import Stages


class BesideMixers:
    """As `Attention`, and as `MambaMixer`."""

    def __init__(self, attention: Attention, mamba: MambaMixer) -> None:
        self._attention, self._mamba = attention, mamba
        self.sites, self.states, self.pass_again = attention.sites, mamba.states, mamba.pass_again

    @property
    def exchanges(self) -> int:
        """Of `stages`."""
        return self._attention.exchanges + self._mamba.exchanges

    def stages(
        self, norm: Normed, x: Tensor, delta: Tensor | None, turn: Turn, attend: Attend
    ) -> Stages[Collectives, Tensor]:
        """The sum of both answers to norm(x + delta), which x becomes before the norm."""
        own, plain = norm.of_sum(x, delta), NoNorm()
        answer = yield from self._mamba.stages(plain, own, None, turn, attend)
        return add(answer, (yield from self._attention.stages(plain, own, None, turn, attend)))
