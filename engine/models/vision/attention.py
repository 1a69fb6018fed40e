"""Bidirectional attention of a vision tower within spans of patches."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.layers.rope import Turn

ELEMENTS_AT_ONCE = 16 << 10  # of fp32 on a CPU, rotated at once: fits a cache


class Spans(NamedTuple):
    """Spans of each frame: from patch `first`, `runs` of `length` patches."""

    first: int
    runs: int
    length: int


class FrameLayout(NamedTuple):
    """`frames` equal frames of patches. `turn`: RoPE of one frame, if any."""

    frames: int
    turn: Turn | None


class VisionAttention:
    """Attention within frames. `qkv` maps to q, k and v, each [heads, head_dim]."""

    def __init__(self, qkv: Linear, out: Linear, *, heads: int) -> None:
        self._qkv, self._out, self._heads = qkv, out, heads

    def __call__(
        self, norm: Norm, x: Tensor, delta: Tensor | None, layout: FrameLayout, spans: Sequence[Spans]
    ) -> Tensor:
        frames = layout.frames
        qkv = self._qkv.of_norm(norm, x, delta).view(frames, len(x) // frames, 3, self._heads, -1)
        if layout.turn is not None:
            _turn(qkv[:, :, :2].flatten(2, 3), layout.turn)
        q, k, v = qkv.unbind(2)
        return self._out(attend(q, k, v, spans).flatten(0, 1))


def _turn(heads: Tensor, turn: Turn) -> None:
    patches, count, dim = heads.shape[1:]
    rows = max(1, ELEMENTS_AT_ONCE // (count * dim)) if heads.device.type == "cpu" else patches
    for frame in heads:
        for part, cos, sin in zip(frame.split(rows), *(of.split(rows) for of in turn), strict=True):
            left, right = (half.to(torch.float32, copy=True) for half in part.chunk(2, -1))
            half = dim // 2
            part[..., :half] = (left * cos[..., :half]).addcmul_(right, sin[..., :half])
            part[..., half:] = right.mul_(cos[..., half:]).addcmul_(left, sin[..., half:])


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Spans]) -> Tensor:
    """Attend within `spans`, which cover a frame: [frames, patches, heads * head_dim].

    q, k, v: [frames, patches, heads, head_dim].
    """
    return (
        torch.cat([_attend_in(span, q, k, v) for span in spans], 1) if len(spans) > 1 else _attend_in(spans[0], q, k, v)
    )


def _attend_in(span: Spans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    frames, _, heads, dim = q.shape
    first, runs, length = span
    own = slice(first, first + runs * length)
    parts = (x[:, own].reshape(frames * runs, length, heads, dim).transpose(1, 2) for x in (q, k, v))
    seen = functional.scaled_dot_product_attention(*parts)
    return seen.transpose(1, 2).reshape(frames, runs * length, heads * dim)
