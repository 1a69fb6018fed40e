"""A layer of a vision tower: attention and an MLP, each behind a norm."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.models.vision.attention import FrameLayout, Spans, VisionAttention
from engine.models.vision.weights import VisionWeights


class VisionMLP(Protocol):
    """The part of a layer that computes each patch by itself."""

    def of_norm(self, norm: Norm, x: Tensor, delta: Tensor | None) -> Tensor:
        """The MLP of norm(x + delta), which x becomes before the norm."""


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(self, up: Linear, down: Linear, *, activation: Callable[[Tensor], Tensor]) -> None:
        self._up, self._down, self._activation = up, down, activation

    def of_norm(self, norm: Norm, x: Tensor, delta: Tensor | None) -> Tensor:
        return self._down(self._activation(self._up.of_norm(norm, x, delta)))


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down

    def of_norm(self, norm: Norm, x: Tensor, delta: Tensor | None) -> Tensor:
        return self._down(self._gate_up.gated_of_norm(norm, x, delta))


def attention_of(weights: VisionWeights, qkv: Sequence[str], out: str, *, hidden: int, heads: int) -> VisionAttention:
    """Load attention. `qkv`: names of its matrices for q, k and v: three, or one that holds all."""
    rows = 3 * hidden // len(qkv)
    return VisionAttention(weights.linear(qkv, rows, hidden), weights.linear([out], hidden, hidden), heads=heads)


class VisionBlock:
    """As the decoder's layers: adds what the one before has computed, and returns its own part, so each sum is one pass with a norm."""

    def __init__(self, norms: tuple[Norm, Norm], attention: VisionAttention, mlp: VisionMLP) -> None:
        self._norms, self._attention, self._mlp = norms, attention, mlp

    def __call__(self, x: Tensor, delta: Tensor | None, layout: FrameLayout, spans: Sequence[Spans]) -> Tensor:
        """Add `delta` to x [patches, hidden] in place; [patches, hidden] that is to be added next."""
        delta = self._attention.of_norm(self._norms[0], x, delta, layout, spans)
        return self._mlp.of_norm(self._norms[1], x, delta)
