"""Attention of a decoder layer: QKV product, RoPE, backend, output product."""

from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.paged_attention import Softmax
from engine.layers.linear import LinearSite, Normed, WholeNorm, sigmoid_mul
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

    def __call__(
        self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend
    ) -> torch.Tensor:
        """Compute attention of norm(x + delta); adds `delta` to x in place."""
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
        return self._out(sigmoid_mul(gates, out) if self._is_gated else out)


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
