"""Layers of a vision tower (pre-norm), and its patch merger."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import LayerNorm, Linear, Norm, RMSNorm
from engine.layers.rope import Turn
from engine.model_files.tower_config import TowerConfig
from engine.models.checkpoint import Checkpoint
from engine.parallel.layout import Extent

# ---- Bidirectional attention of a vision tower within spans of patches.

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


# ---- Loads layers of a vision tower, replicated, as floats.


class VisionWeights:
    """Tensors under `prefix`, without ".weight" and ".bias"."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.dtype, self.device = checkpoint.dtype, checkpoint.device

    def inside(self, prefix: str) -> "VisionWeights":
        return VisionWeights(self._checkpoint, self._prefix + prefix)

    def tensor(self, name: str, shape: Sequence[Extent], *, dtype: torch.dtype | None = None) -> Tensor:
        return self._checkpoint.take(self._prefix + name, shape, dtype=dtype)

    def linear(
        self, names: Sequence[str], outputs: int, inputs: int, *, bias: bool = True, gates: bool = False
    ) -> Linear:
        """Load matrices [outputs, inputs] each, concatenated."""
        full, rows = [self._prefix + name for name in names], [outputs] * len(names)
        weight = self._checkpoint.take_rows([f"{name}.weight" for name in full], rows, [inputs])
        vector = self._checkpoint.take_rows([f"{name}.bias" for name in full], rows, []) if bias else None
        return Linear(weight, vector, gates=gates)

    def convolution(self, name: str, shape: Sequence[int], *, bias: bool) -> Linear:
        """Load a patch embedding as linear layer. `shape`: [outputs, values of a patch ...]."""
        weight = self.tensor(f"{name}.weight", shape).flatten(1)
        return Linear(weight, self.tensor(f"{name}.bias", shape[:1]) if bias else None)

    def norm(self, name: str, width: int, *, eps: float, rms: bool = False) -> Norm:
        weight = self.tensor(f"{name}.weight", [width])
        return RMSNorm(weight, eps=eps) if rms else LayerNorm(weight, self.tensor(f"{name}.bias", [width]), eps=eps)

    def ignore(self, name: str) -> None:
        self._checkpoint.ignore(self._prefix + name)


# ---- Patch positions in a frame, as RoPE or added vectors.


class AxialRope:
    """2D RoPE in fp32: half of the pairs by row, half by column (Qwen2-VL, arXiv:2409.12191)."""

    def __init__(self, head_dim: int, *, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self._frequencies = (1.0 / theta**exponents).to(device)

    def at(self, rows: Tensor, columns: Tensor) -> Turn:
        """(cos, signed sin), each [patches, 1, head_dim]; `rows`, `columns` [patches] i64."""
        places = torch.stack((rows, columns), 1).to(self._frequencies.device).float()
        angles = (places.unsqueeze(-1) * self._frequencies).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)


class LearnedPositions:
    """Position vectors from `table` [side * side, hidden].

    They are bilinearly interpolated with aligned corners (Qwen3-VL).
    """

    def __init__(self, table: Tensor, *, side: int) -> None:
        self._table, self._side = table, side

    def at(self, rows: Tensor, columns: Tensor, *, size: tuple[int, int]) -> Tensor:
        total = torch.zeros(len(rows), self._table.shape[1], device=self._table.device)
        for row, row_weight in self._taps(rows, size[0]):
            for column, weight in self._taps(columns, size[1]):
                index = (row * self._side + column).to(self._table.device)
                weights = (row_weight * weight).unsqueeze(1).to(self._table.device)
                total.addcmul_(self._table.index_select(0, index).float(), weights)
        return total.to(self._table.dtype)

    def _taps(self, places: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        at = places.float() * (self._side - 1) / max(size - 1, 1)
        first = at.floor().long()
        part = at - first
        return [(first, 1 - part), ((first + 1).clamp(max=self._side - 1), part)]


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


VisionMLP = Callable[[Norm, Tensor, Tensor | None], Tensor]  # of norm(x + delta)


def plain_mlp(up: Linear, down: Linear, activation: Callable[[Tensor], Tensor]) -> VisionMLP:
    return lambda norm, x, delta: down(activation(up.of_norm(norm, x, delta)))


def gated_mlp(gate_up: Linear, down: Linear) -> VisionMLP:
    return lambda norm, x, delta: down(gate_up.gated_of_norm(norm, x, delta))


class VisionBlock:
    """A layer; returns the delta for the next to add, fused with its norm."""

    def __init__(self, norms: tuple[Norm, Norm], attention: VisionAttention, mlp: VisionMLP) -> None:
        self._norms, self._attention, self._mlp = norms, attention, mlp

    def __call__(self, x: Tensor, delta: Tensor | None, layout: FrameLayout, spans: Sequence[Spans]) -> Tensor:
        delta = self._attention(self._norms[0], x, delta, layout, spans)
        return self._mlp(self._norms[1], x, delta)


class BlockNames(NamedTuple):
    """Tensors of a layer, after `place` and its number. `up`: with a gate, if two.

    `merger`: norm and matrices of mergers. `rms`: of all norms.
    """

    up: tuple[str, ...]
    down: str
    place: str = "blocks."
    qkv: tuple[str, ...] = ("attn.qkv",)
    out: str = "attn.proj"
    norms: tuple[str, str] = ("norm1", "norm2")
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")
    rms: bool = False


def block_of(weights: VisionWeights, config: TowerConfig, names: BlockNames) -> VisionBlock:
    hidden, width, gates = config.hidden_size, config.intermediate_size, len(names.up) > 1
    qkv = weights.linear(names.qkv, 3 * hidden // len(names.qkv), hidden)
    attention = VisionAttention(qkv, weights.linear([names.out], hidden, hidden), heads=config.num_heads)
    up, down = weights.linear(names.up, width, hidden, gates=gates), weights.linear([names.down], hidden, width)
    mlp = gated_mlp(up, down) if gates else plain_mlp(up, down, ACTIVATIONS[config.activation])
    first, second = (weights.norm(name, hidden, eps=config.eps, rms=names.rms) for name in names.norms)
    return VisionBlock((first, second), attention, mlp)


class PatchMerger:
    """Merges a token's patches: fc2(gelu(fc1(concatenated patches))).

    `after`: norm the concatenation.
    """

    def __init__(self, norm: Norm, fc1: Linear, fc2: Linear, *, width: int, after: bool = False) -> None:
        self._norm, self._fc1, self._fc2, self._width, self._after = norm, fc1, fc2, width, after

    def __call__(self, x: Tensor) -> Tensor:
        rows = self._norm(x.view(-1, self._width)) if self._after else self._norm(x).view(-1, self._width)
        return self._fc2(gelu(self._fc1(rows)))


def merger_of(
    weights: VisionWeights, config: TowerConfig, names: BlockNames, *, size: int, after: bool = False
) -> PatchMerger:
    norm, up, down = names.merger
    width = config.hidden_size * config.merge**2
    own = weights.norm(norm, width if after else config.hidden_size, eps=config.eps, rms=names.rms)
    both = weights.linear([up], width, width), weights.linear([down], size, width)
    return PatchMerger(own, *both, width=width, after=after)
