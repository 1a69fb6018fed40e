"""Layers of a vision tower (pre-norm), and its patch merger."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.models.vision.attention import FrameLayout, Spans, VisionAttention
from engine.models.vision.weights import VisionWeights


def gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x.mul_(torch.sigmoid(1.702 * x))


def silu(x: Tensor) -> Tensor:
    return functional.silu(x, inplace=True)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
}


class VisionMLP(Protocol):
    def __call__(self, norm: Norm, x: Tensor, delta: Tensor | None) -> Tensor:
        """Compute the MLP of norm(x + delta)."""


class PlainMLP:
    def __init__(self, up: Linear, down: Linear, *, activation: Callable[[Tensor], Tensor]) -> None:
        self._up, self._down, self._activation = up, down, activation

    def __call__(self, norm: Norm, x: Tensor, delta: Tensor | None) -> Tensor:
        return self._down(self._activation(self._up.of_norm(norm, x, delta)))


class GatedMLP:
    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, norm: Norm, x: Tensor, delta: Tensor | None) -> Tensor:
        return self._down(self._gate_up.gated_of_norm(norm, x, delta))


def attention_of(weights: VisionWeights, qkv: Sequence[str], out: str, *, hidden: int, heads: int) -> VisionAttention:
    rows = 3 * hidden // len(qkv)
    return VisionAttention(weights.linear(qkv, rows, hidden), weights.linear([out], hidden, hidden), heads=heads)


class VisionBlock:
    """A layer; returns the delta for the next to add, fused with its norm."""

    def __init__(self, norms: tuple[Norm, Norm], attention: VisionAttention, mlp: VisionMLP) -> None:
        self._norms, self._attention, self._mlp = norms, attention, mlp

    def __call__(self, x: Tensor, delta: Tensor | None, layout: FrameLayout, spans: Sequence[Spans]) -> Tensor:
        delta = self._attention(self._norms[0], x, delta, layout, spans)
        return self._mlp(self._norms[1], x, delta)


class PatchMerger:
    """Merges a token's patches: fc2(gelu(fc1(concatenated patches))).

    `after`: norm the concatenation.
    """

    def __init__(self, norm: Norm, fc1: Linear, fc2: Linear, *, width: int, after: bool = False) -> None:
        self._norm, self._fc1, self._fc2, self._width, self._after = norm, fc1, fc2, width, after

    def __call__(self, x: Tensor) -> Tensor:
        rows = self._norm(x.view(-1, self._width)) if self._after else self._norm(x).view(-1, self._width)
        return self._fc2(gelu(self._fc1(rows)))
