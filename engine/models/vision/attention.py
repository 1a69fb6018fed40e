"""Attention of a vision tower: patches of a span see one another, both ways."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.layers.rope import Turn, apply_rope


class Spans(NamedTuple):
    """Of each frame, from patch `first` on: `count` runs of `length` patches."""

    first: int
    count: int
    length: int


class FrameLayout(NamedTuple):
    """Patches are those of `frames` equal frames, one behind the other. `turn`: of one frame's; None: positions are in the states."""

    frames: int
    turn: Turn | None


class VisionAttention:
    """`qkv` maps to q, k and v, each [heads, head_dim]."""

    def __init__(self, qkv: Linear, out: Linear, *, heads: int) -> None:
        self._qkv, self._out, self._heads = qkv, out, heads

    def of_norm(
        self, norm: Norm, x: Tensor, delta: Tensor | None, layout: FrameLayout, spans: Sequence[Spans]
    ) -> Tensor:
        """Attention of norm(x + delta), which x becomes before the norm."""
        frames = layout.frames
        qkv = self._qkv.of_norm(norm, x, delta).view(frames, len(x) // frames, 3, self._heads, -1)
        q, k, v = qkv.unbind(2)
        if layout.turn is not None:
            q, k = _turned(q, layout.turn), _turned(k, layout.turn)
        return self._out(attend(q, k, v, spans).flatten(0, 1))


def _turned(x: Tensor, turn: Turn) -> Tensor:
    return apply_rope(x.float(), *turn).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Spans]) -> Tensor:
    """[frames, patches, heads * head_dim] for q, k and v [frames, patches, heads, head_dim]; `spans` cover a frame."""
    frames, patches, heads, dim = q.shape
    out = torch.empty(frames, patches, heads * dim, dtype=q.dtype, device=q.device)
    for first, count, length in spans:
        own = slice(first, first + count * length)
        runs = [x[:, own].reshape(frames * count, length, heads, dim).transpose(1, 2) for x in (q, k, v)]
        seen = functional.scaled_dot_product_attention(*runs)
        out[:, own] = seen.transpose(1, 2).reshape(frames, count * length, heads * dim)
    return out
