"""What the executor needs of a model of any family."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.kv.cache_spec import CacheSpec
from engine.layers.linear import LinearSite

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]: writes k and v into the KV pool, then attends with
# scale D ** -0.5. RoPE has turned q and k; the three may be views of one tensor.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

Begun = tuple[Tensor, ...]  # what a model's layers start from: a row for each token


class CausalLM(Protocol):
    """A decoder-only model. T tokens of any requests are one flat batch: only `attend` separates requests."""

    def cache_specs(self) -> list[CacheSpec]:
        """The KV of each layer."""

    def linear_sites(self) -> list[LinearSite]:
        """The matrices that adapters may change, in the same order for all models of one shape."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`layers(begin(input_ids, positions), attend)`: [T, hidden] after the final norm; ids, positions [T] i64."""

    def begin(self, input_ids: Tensor, positions: Tensor) -> Begun:
        """All that depends on ids and positions."""

    def layers(self, begun: Begun, attend: Attend) -> Tensor:
        """The rest of `forward`; may change `begun` in place."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] float32 for `hidden` [n, hidden], rows from `forward`."""
