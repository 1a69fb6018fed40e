"""Rotary position embedding (RoFormer, Su et al. 2021), in half-split layout.

Pair i is dims (i, i + D/2), rotated by position * inverse_frequency[i]. q and k of interleaved or
partial RoPE are loaded in `head_order`; scores do not depend on a common order.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from engine.kernels.paged_attention import Softmax
from engine.kernels.rows import LANES, elementwise_on_cpu
from engine.model_files.model_config import ModelConfig
from engine.model_files.rope_config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling

Turn = tuple[torch.Tensor, torch.Tensor]  # cosine and signed sine of positions


class Rope:
    """A table of cos and sin: max_position_embeddings * 2 * rotary dim elements."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = inverse_frequencies(config.rope)
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        factor = attention_factor(config.rope)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        unturned = 0 if config.latent else (config.head_dim - config.rope.dim) // 2
        cos, sin = functional.pad(cos, (0, unturned), value=1.0), functional.pad(sin, (0, unturned))
        # sin carries the sign of its half, so that rotation takes three operations
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self._table = table.to(dtype=dtype, device=device).unsqueeze(2)

    def at(self, positions: torch.Tensor) -> Turn:
        """(cos, signed sin), each [T, 1, D], for `positions` [T] i64."""
        rows = self._table.index_select(0, positions)
        return rows[:, 0], rows[:, 1]

    def of_dimensions(self, positions: torch.Tensor, dimensions: torch.Tensor) -> Turn:
        """The same for `positions` [3, T] i64; dim d uses row `dimensions`[d] (M-RoPE)."""
        rows = self._table[positions]
        picked = rows.gather(0, dimensions.expand(1, *rows.shape[1:])).squeeze(0)
        return picked[:, 0], picked[:, 1]


class NormedRope:
    """RMS norm and RoPE of q and k in one tensor [T, H, D]; may change it.

    `weight` [H, D]: rounded before weight + offset is applied. `like`: a tensor [..., D] of x's
    dtype and device. Triton has a fused kernel that also writes KV.
    """

    def __init__(self, weight: torch.Tensor | None, *, like: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self._kernel = elementwise_on_cpu(like, multiple=2 * LANES)

    def __call__(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        if self._kernel is not None:
            self._kernel.norm_rope(x, turn, weight=self.weight, eps=self.eps, offset=self.offset)
            return x
        if self.weight is not None:
            weight = self.weight.float() + self.offset if self.offset else self.weight
            x = functional.rms_norm(x, x.shape[-1:], None, self.eps).mul_(weight)
        return apply_rope(x, *turn)


@dataclass(frozen=True, slots=True)
class Unturned:
    """qkv [T, heads + 2 * kv_heads, D] of a layer, before norm and RoPE.

    Rotate once only, because it may change qkv.
    """

    qkv: torch.Tensor
    kv_heads: int
    rope: NormedRope
    turn: Turn
    softmax: Softmax

    def turned(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D], perhaps views of one tensor."""
        kv_heads = self.kv_heads
        heads = self.qkv.shape[1] - 2 * kv_heads
        qk, v = torch.split(self.qkv, [heads + kv_heads, kv_heads], dim=1)
        q, k = torch.split(self.rope(qk, self.turn), [heads, kv_heads], dim=1)
        return q, k, v


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor; x [T, H, D]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def head_order(rope: RopeConfig, head_dim: int) -> list[int] | None:
    """Checkpoint dim of each head dim, None if unchanged.

    Rotary pairs (i, i + head_dim / 2) come first.
    """
    if rope.dim == head_dim and not rope.interleaved:
        return None
    turned = range(0, rope.dim, 2) if rope.interleaved else range(rope.dim // 2)
    apart = 1 if rope.interleaved else rope.dim // 2
    left = range(rope.dim, head_dim)
    half = len(left) // 2
    return [*turned, *left[:half], *(dim + apart for dim in turned), *left[half:]]


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """[dim / 2] fp32: radians per token."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return frequencies
        case FrequencyFactors(factors):
            return frequencies / torch.tensor(factors, dtype=torch.float32)
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling)


def attention_factor(rope: RopeConfig) -> float:
    scaling = rope.scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling | FrequencyFactors) else 1.0


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Source: Llama 3.1's model card and transformers.modeling_rope_utils."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # rotations in the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling) -> torch.Tensor:
    span = max(scaling.high - scaling.low, 0.001)
    divided = ((torch.arange(len(frequencies)) - scaling.low) / span).clamp(0.0, 1.0)
    return frequencies * (1.0 - divided) + frequencies / scaling.factor * divided


# ---- RoPE tables of a stage, also for layers without RoPE.


class _NoRope:
    def __init__(self, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._one = torch.ones((1, 1, dim), dtype=dtype, device=device)
        self._zero = torch.zeros_like(self._one)

    def at(self, positions: torch.Tensor) -> Turn:
        shape = (len(positions), -1, -1)
        return self._one.expand(shape).contiguous(), self._zero.expand(shape).contiguous()

    def of_dimensions(self, positions: torch.Tensor, dimensions: torch.Tensor) -> Turn:
        return self.at(positions[0])


class LayerRopes:
    """One table per kind of RoPE; `way_of[n]`: the kind of the stage's layer n."""

    def __init__(self, config: ModelConfig, layers: range, *, dtype: torch.dtype, device: torch.device) -> None:
        ropes = [config.rope_of(layer) for layer in layers]
        ways = list(dict.fromkeys(ropes))
        self.way_of = [ways.index(rope) for rope in ropes]
        self._ways = [
            _NoRope(config.head_dim, dtype=dtype, device=device)
            if rope is None
            else Rope(replace(config, rope=rope), dtype=dtype, device=device)
            for rope in ways
        ]
        self._dimensions = _dimensions(config).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each kind's (cos, signed sin) for `positions` [T] i64, or [3, T] (M-RoPE)."""
        if positions.dim() == 2:
            return tuple(x for way in self._ways for x in way.of_dimensions(positions, self._dimensions))
        return tuple(x for way in self._ways for x in way.at(positions))


def _dimensions(config: ModelConfig) -> torch.Tensor:
    half = torch.zeros(config.head_dim // 2, dtype=torch.int64)
    if config.vision is not None and config.vision.mrope is not None:
        pairs = torch.tensor(config.vision.mrope.dimensions())
        half[: len(pairs)] = pairs
    return torch.cat((half, half))
