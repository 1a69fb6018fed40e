"""A decoder layer: attention, an MLP, and norms.

Attention is a QKV product, RoPE, a backend and the output product.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from engine.kernels.paged_attention import Softmax
from engine.layers.linear import (
    GATES,
    Addend,
    LinearSite,
    NoNorm,
    Normed,
    Scaled,
    WholeNorm,
    add,
    normed_later,
    settled,
    sigmoid_mul,
)
from engine.layers.rope import NormedRope, Turn, Unturned, head_order
from engine.models.part import ModelPart
from engine.parallel.layout import Cut

# (layer of the stage, new tokens) -> [T, Hq * D]: norms and rotates q and k, writes k and v into
# the KV pool, then attends.
# Latent attention gives NewLatents (engine/layers/latents.py) in place of Unturned, to a backend of its own.
Attend = Callable[[int, Any], torch.Tensor]


class Attention:
    """Attention with one QKV matrix; q, k and v stay one tensor until RoPE, to save launches."""

    def __init__(self, part: ModelPart, prefix: str, *, place: int, inputs: int | None = None) -> None:
        """`place`: index in the KV pool. `inputs`: default the hidden size."""
        config, share = part.config, part.share
        self._layer = place
        self._is_gated = config.attention_gate
        self._heads, self._kv_heads, self._dim = len(share.heads), len(share.kv_heads), config.head_dim
        self._qkv, qkv = part.qkv(prefix, inputs=inputs)
        factor = config.arithmetic.attention_factor
        self._out, out = part.rows(f"{prefix}{part.out_name}", part.q, bias=config.attention_out_bias, factor=factor)
        self.sites = [LinearSite(self._qkv, qkv)]
        if factor == 1.0:  # LoRA would have to apply the factor, too
            self.sites.append(LinearSite(self._out, out))
        norm = self._head_norm(part, prefix) if config.qk_norm == "head" else None
        self._softmax = _softmax(part, prefix)
        self._clip = config.arithmetic.clip
        self._whole_norm = _whole_norm(part, prefix) if config.qk_norm == "whole" else None
        like = torch.empty(self._dim, dtype=part.checkpoint.dtype, device=part.checkpoint.device)
        self._rope = NormedRope(norm, like=like, eps=config.rms_norm_eps, offset=config.arithmetic.norm_offset)

    def _head_norm(self, part: ModelPart, prefix: str) -> torch.Tensor:
        q, k = (part.checkpoint.take(f"{prefix}{name}_norm.weight", [self._dim]) for name in "qk")
        if (order := head_order(part.config.rope, self._dim)) is not None:
            q, k = q[order], k[order]
        return torch.cat((q.expand(self._heads, -1), k.expand(self._kv_heads, -1)))

    def __call__(self, norm: Normed, x: torch.Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Addend:
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self._qkv.of_norm(norm, x, delta)
        if self._clip:
            qkv.clamp_(-self._clip, self._clip)
        if self._whole_norm is not None:
            self._whole_norm(qkv)
        if self._is_gated:
            gates, qkv = torch.split(qkv, [heads * self._dim, (heads + 2 * kv_heads) * self._dim], dim=1)
        new = Unturned(qkv.view(-1, heads + 2 * kv_heads, self._dim), kv_heads, self._rope, turn, self._softmax)
        out = attend(self._layer, new)
        return self._out.later(sigmoid_mul(gates, out) if self._is_gated else out)


def _softmax(part: ModelPart, prefix: str) -> Softmax:
    config, own = part.config.arithmetic, Cut(part.config.num_heads, part.share.heads)
    sinks = part.checkpoint.take(f"{prefix}sinks", [own], dtype=torch.float32) if config.sinks else None
    return Softmax(config.attention_scale or part.config.head_dim**-0.5, config.score_cap, sinks)


def _whole_norm(part: ModelPart, prefix: str) -> WholeNorm:
    copies = part.place.tp_size * len(part.share.kv_heads) // part.config.num_kv_heads
    weights = [
        part.checkpoint.take(f"{prefix}{name}_norm.weight", [cut]) for name, cut in (("q", part.q), ("k", part.kv))
    ]
    if (order := head_order(part.config.rope, part.config.head_dim)) is not None:
        weights = [weight.view(-1, part.config.head_dim)[:, order].flatten() for weight in weights]
    return WholeNorm(
        (weights[0], weights[1]),
        sizes=(part.q.total, part.kv.total),
        eps=part.config.rms_norm_eps,
        collectives=part.collectives,
        copies=copies,
    )


class Norms(NamedTuple):
    """Checkpoint names of norms, without "_layernorm"; empty: absent."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


NORMS = {
    "before": Norms("input", "", "post_attention", ""),
    "before, Falcon": Norms("input", "", "pre_ff", ""),
    "after": Norms("", "post_attention", "", "post_feedforward"),
    "both": Norms("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "beside": Norms("input", "", "", ""),
    "around": Norms("input", "post_self_attn", "post_attention", "post_mlp"),
}


class Mixer(Protocol):
    """Attention, or a recurrence in its place."""

    sites: list[LinearSite]

    def __call__(self, norm: Normed, x: torch.Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Addend:
        """[T, hidden] of norm(x + delta); adds `delta` to x in place."""


class FeedForward(Protocol):
    sites: list[LinearSite]

    def __call__(self, norm: Normed, x: torch.Tensor, delta: Addend | None) -> Addend:
        """[T, hidden] of norm(x + delta), equal on all ranks; adds `delta` to x in place."""

    def join(self) -> None:
        """Compute with other DP ranks, without own tokens."""


class DenseMLP:
    """down(act(gate(x)) * up(x)) with one gate-up matrix, or down(act(up(x)))."""

    def __init__(self, part: ModelPart, prefix: str) -> None:
        self._activation, self._is_gated = part.config.arithmetic.activation, part.config.arithmetic.is_gated
        self._gate_up, gate_up = part.gate_up(prefix, gates=self._activation == "silu")
        width, factor = part.mlp_cut(part.config.intermediate_size), part.config.arithmetic.down_factor
        name, bias = f"{prefix}{part.mlp_names.down}", part.mlp_names.bias
        self._down, down = part.rows(name, width, bias=bias, factor=factor)
        self.sites = [LinearSite(self._gate_up, gate_up), LinearSite(self._down, down)]
        if factor != 1.0:
            self.sites = []  # LoRA would have to apply the factors

    def __call__(self, norm: Normed, x: torch.Tensor, delta: Addend | None) -> Addend:
        if self._is_gated:
            return self._down.later(self._gate_up.gated_of_norm(norm, x, delta, gate=self._activation))
        return self._down.later(GATES[self._activation](self._gate_up.of_norm(norm, x, delta)))

    def join(self) -> None:
        raise AssertionError("without DP attention no rank computes for others")


class Layer:
    """A layer with norms before attention and MLP."""

    def __init__(
        self, part: ModelPart, prefix: str, *, attention: Callable[[], Mixer], mlp: Callable[[], FeedForward]
    ) -> None:
        names = NORMS[part.config.norms]

        def norm(name: str) -> Normed:
            return part.norm(f"{prefix}{name}_layernorm") if name else NoNorm()

        self._attention_norm, self._mlp_norm = norm(names.before_attention), norm(names.before_mlp)
        self.attention, self.mlp = attention(), mlp()
        self.sites = [*self.attention.sites, *self.mlp.sites]

    def __call__(self, x: torch.Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Addend:
        """Add `delta`, the previous layer's output, to x; return this layer's.

        The addition is fused with a norm.
        """
        return self.mlp(self._mlp_norm, x, self.attention(self._attention_norm, x, delta, turn, attend))

    def join(self) -> None:
        self.mlp.join()


class ParallelLayer(Layer):
    """Attention and MLP of the same normed input (Phi)."""

    def __call__(self, x: torch.Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> torch.Tensor:
        own = self._attention_norm.of_sum(x, delta)
        answer = settled(self.attention(self._mlp_norm, own, None, turn, attend))
        return add(answer, self.mlp(self._mlp_norm, own, None))


class ShapedLayer(Layer):
    """A layer whose attention and MLP outputs are normed, or scaled."""

    def __init__(
        self, part: ModelPart, prefix: str, *, attention: Callable[[], Mixer], mlp: Callable[[], FeedForward]
    ) -> None:
        super().__init__(part, prefix, attention=attention, mlp=mlp)
        names, scale = NORMS[part.config.norms], Scaled(part.config.arithmetic.residual_scale)
        self._after_attention, self._after_mlp = (
            partial(normed_later, part.norm(f"{prefix}{name}_layernorm")) if name else scale.later
            for name in (names.after_attention, names.after_mlp)
        )

    def __call__(self, x: torch.Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Addend:
        delta = self._after_attention(self.attention(self._attention_norm, x, delta, turn, attend))
        return self._after_mlp(self.mlp(self._mlp_norm, x, delta))
