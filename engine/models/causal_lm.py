"""What the executor needs of a model. It runs any family through this and nothing else."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.kv.cache_spec import CacheSpec
from engine.layers.linear import LinearSite

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]. It writes k and v into the KV pool, then attends
# with scale D ** -0.5. q and k come with their positions turned in; the three may be views of one tensor.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

Begun = tuple[Tensor, ...]  # what a model's layers start from: each tensor has a row for each token


class CausalLM(Protocol):
    """A decoder-only model. T tokens of any number of requests are one flat batch: only `attend` tells them apart."""

    def cache_specs(self) -> list[CacheSpec]:
        """What each layer wants remembered, in layer order."""
        ...

    def linear_sites(self) -> list[LinearSite]:
        """The matrices that adapters may change, in the same order for all models of one shape."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden] after the final norm, for `input_ids` and `positions` [T] i64 on the device.

        The same as `layers(begin(input_ids, positions), attend)`.
        """
        ...

    def begin(self, input_ids: Tensor, positions: Tensor) -> Begun:
        """What comes before the layers: all that depends on ids and positions."""
        ...

    def layers(self, begun: Begun, attend: Attend) -> Tensor:
        """The rest of `forward`; may change `begun` in place."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] float32 for `hidden` [n, hidden], rows of what `forward` gave."""
        ...
