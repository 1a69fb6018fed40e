"""The dense decoder of all families; they differ in biases, in where norms stand, and in how q and k turn (`Family`).

A rank has its stage's layers, and of each layer some heads and a part of the MLP: two sums over the stage's ranks a layer. Norms and
the residual stream are the same on all of them. With DP attention the MLPs are those of all DP ranks (engine/models/shared_mlp.py).
"""

import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from engine.kv.kv_pool import CacheSpec
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear, LinearSite, SiteShape
from engine.layers.norm import NoNorm, Normed, RMSNorm, WholeNorm, add
from engine.layers.rope import NormedRope, Rope, Turn, Unturned, head_order
from engine.model_files.model_config import FAMILIES
from engine.models.expert_mlp import ExpertMLP
from engine.models.part import ModelPart
from engine.models.shared_mlp import SharedMLP

# (layer of the stage, new tokens) -> [T, Hq * D]: norms and turns q and k, writes k and v into the KV pool, then attends with scale
# D ** -0.5.
Attend = Callable[[int, Unturned], torch.Tensor]

Begun = tuple[torch.Tensor, ...]  # what the layers start from: a row for each token


class DenseDecoder:
    """Pre-norm attention and gated MLP, for each layer of `part`.

    T tokens of any requests are one flat batch: only `attend` separates requests. Ranks call the same methods with the same rows.
    """

    def __init__(self, part: ModelPart) -> None:
        config, place, share = part.config, part.place, part.share
        self._config, self._share, self._collectives = config, share, part.collectives
        self._specs = [
            CacheSpec(
                num_kv_heads=len(share.kv_heads),
                head_dim=config.head_dim,
                dtype=part.checkpoint.dtype_name,
                window=config.windows[layer] if config.windows else 0,
            )
            for layer in share.layers
        ]
        tied = config.tie_word_embeddings
        table = (
            part.table("model.embed_tokens.weight") if place.is_first_stage or (tied and place.is_last_stage) else None
        )
        self._embedding = self._norm = self._head = None
        if place.is_first_stage:
            assert table is not None
            self._embedding = Embedding(table, own=share.vocab, collectives=part.collectives)
        self._layers = [_Layer(part, index, place=n) for n, index in enumerate(share.layers)]
        if place.is_last_stage:
            self._norm = RMSNorm(part.vector("model.norm.weight"), eps=config.rms_norm_eps)
            self._head = Linear(part.table("lm_head.weight") if table is None or not tied else table)
        part.leave_the_rest()
        self._rope = Rope(config, dtype=part.checkpoint.dtype, device=part.checkpoint.device)

    @property
    def recordable(self) -> bool:
        """Whether a step of it can be calls of our C kernels alone."""
        return self._config.qk_norm != "whole" and self._config.experts is None

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def cache_specs(self) -> list[CacheSpec]:
        """Of the rank's layers and KV heads."""
        return list(self._specs)

    def linear_sites(self) -> list[LinearSite]:
        """The matrices that adapters may change, in the same order for all models of one shape."""
        return [site for layer in self._layers for site in layer.sites]

    def other_sites(self) -> list[SiteShape]:
        """Those of other stages: the layers are alike."""
        return [
            SiteShape(site.shape.in_size, tuple((_of_layer(index, name), rows) for name, rows in site.shape.parts))
            for index in range(self._config.num_layers)
            if index not in self._share.layers
            for site in self._layers[0].sites
        ]

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, hidden] after the stage: of the last one after the final norm. `inputs`: as in `begin`."""
        return self.layers(self.begin(inputs, positions), attend)

    def begin(self, inputs: torch.Tensor, positions: torch.Tensor) -> Begun:
        """Hidden states [T, hidden], and cos and sin of `positions` [T] i64.

        `inputs`: token ids [T] i64, or on a later stage the [T, hidden] that the one before has computed.
        """
        hidden = inputs if self._embedding is None else self._embedding(inputs)
        return hidden, *self._rope.at(positions)

    def layers(self, begun: Begun, attend: Attend) -> torch.Tensor:
        """The rest of `forward`; may change `begun` in place, and return a part of it."""
        x, cosine, sine = begun
        delta = None
        for layer in self._layers:
            delta = layer(x, delta, (cosine, sine), attend)
        if self._norm is not None:
            return self._norm.of_sum(x, delta)
        assert delta is not None, "a stage has a layer"
        return add(x, delta)

    def join(self) -> None:
        """Compute this rank's part of what all DP ranks compute together, in a step that only others have tokens in."""
        for layer in self._layers:
            layer.join()

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """[n, vocab] float32 for `hidden` [n, hidden], rows from `forward`; in `out` if given.

        None but on rank 0 of the last stage, where they may be valid until the next call only.
        """
        assert self._head is not None, "the last stage has the head"
        if self._collectives is None:
            return self._head.in_float32(hidden, out=out)
        columns, total = self._share.vocab, self._config.vocab_size
        logits = self._collectives.gather_columns(self._head.in_float32(hidden), columns=columns, total=total)
        return logits if out is None or logits is None else out.copy_(logits)


def _of_layer(index: int, name: str) -> str:
    """`name`: of the same matrix in another layer."""
    return re.sub(r"^model\.layers\.\d+\.", f"model.layers.{index}.", name)


class _Norms(NamedTuple):
    """Names in the checkpoint of a layer's norms, without "_layernorm"; "": there is none."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


_NORMS = {
    "before": _Norms("input", "", "post_attention", ""),
    "after": _Norms("", "post_attention", "", "post_feedforward"),
    "around": _Norms("input", "post_self_attn", "post_attention", "post_mlp"),
}


class _Layer:
    """Layer `index` of the model, which is number `place` of the stage."""

    def __init__(self, part: ModelPart, index: int, *, place: int) -> None:
        prefix, eps = f"model.layers.{index}.", part.config.rms_norm_eps
        names = _NORMS[part.config.norms]

        def norm(name: str) -> RMSNorm:
            return RMSNorm(part.vector(f"{prefix}{name}_layernorm.weight"), eps=eps)

        self._attention_norm: Normed = norm(names.before_attention) if names.before_attention else NoNorm()
        self._mlp_norm: Normed = norm(names.before_mlp) if names.before_mlp else NoNorm()
        self._after_attention = norm(names.after_attention) if names.after_attention else None
        self._after_mlp = norm(names.after_mlp) if names.after_mlp else None
        self._attention = _Attention(part, f"{prefix}self_attn.", place=place)
        self._mlp = _feed_forward(part, index)
        self.sites = [*self._attention.sites, *self._mlp.sites]

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend) -> torch.Tensor:
        """Add `delta`, the output of the layer before, to x; return this layer's. So each sum is one pass with a norm."""
        delta = self._attention.of_norm(self._attention_norm, x, delta, turn, attend)
        if self._after_attention is not None:
            delta = self._after_attention(delta)
        delta = self._mlp.of_norm(self._mlp_norm, x, delta)
        return delta if self._after_mlp is None else self._after_mlp(delta)

    def join(self) -> None:
        """Compute this rank's part for the rows of other DP ranks."""
        assert not isinstance(self._mlp, _MLP), "without DP attention no rank computes for others"
        self._mlp.join()


def _feed_forward(part: ModelPart, index: int) -> "_MLP | SharedMLP | ExpertMLP":
    prefix, experts = f"model.layers.{index}.", part.config.experts
    if experts is not None and not part.config.is_dense(index):
        return ExpertMLP(part, prefix, experts, FAMILIES[part.config.architecture].expert_names)
    if part.exchange is not None:
        return SharedMLP(part, f"{prefix}mlp.", exchange=part.exchange)
    return _MLP(part, f"{prefix}mlp.")


class _Attention:
    """q, k and v come from one matrix and stay one tensor until they are turned, since every operation counts."""

    def __init__(self, part: ModelPart, prefix: str, *, place: int) -> None:
        config, share = part.config, part.share
        self._layer = place
        self._heads, self._kv_heads, self._dim = len(share.heads), len(share.kv_heads), config.head_dim
        self._qkv, qkv = part.qkv(prefix)
        self._out, out = part.rows(f"{prefix}o_proj", part.q, bias=config.attention_out_bias)
        self.sites = [LinearSite(self._qkv, qkv), LinearSite(self._out, out)]
        norm = self._head_norm(part, prefix) if config.qk_norm == "head" else None
        self._whole_norm = _whole_norm(part, prefix) if config.qk_norm == "whole" else None
        like = torch.empty(self._dim, dtype=part.checkpoint.dtype, device=part.checkpoint.device)
        self._rope = NormedRope(norm, like=like, eps=config.rms_norm_eps)

    def _head_norm(self, part: ModelPart, prefix: str) -> torch.Tensor:
        """[heads + kv_heads, head_dim]: the norm's weight of each head."""
        q, k = (part.checkpoint.take(f"{prefix}{name}_norm.weight", [self._dim]) for name in "qk")
        if (order := head_order(part.config.rope, self._dim)) is not None:
            q, k = q[order], k[order]
        return torch.cat((q.expand(self._heads, -1), k.expand(self._kv_heads, -1)))

    def of_norm(
        self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend
    ) -> torch.Tensor:
        """Attention of norm(x + delta), which x becomes before the norm."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self._qkv.of_norm(norm, x, delta)
        if self._whole_norm is not None:
            self._whole_norm(qkv)
        qkv = qkv.view(-1, heads + 2 * kv_heads, self._dim)
        return self._out(attend(self._layer, Unturned(qkv, kv_heads, self._rope, turn)))


def _whole_norm(part: ModelPart, prefix: str) -> WholeNorm:
    copies = part.place.tp_size * len(part.share.kv_heads) // part.config.num_kv_heads
    weights = [
        part.checkpoint.take(f"{prefix}{name}_norm.weight", [cut]) for name, cut in (("q", part.q), ("k", part.kv))
    ]
    return WholeNorm(
        (weights[0], weights[1]),
        sizes=(part.q.total, part.kv.total),
        eps=part.config.rms_norm_eps,
        collectives=part.collectives,
        copies=copies,
    )


class FeedForward(Protocol):
    """What a layer computes behind attention, on all ranks of its stage at once: of every token, or of those that a router of
    experts dispatches to a rank.
    """

    sites: list[LinearSite]

    def of_norm(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """[T, hidden] of norm(x + delta), which x becomes before the norm; the same on all ranks."""


class _MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix [2 * intermediate, hidden]."""

    def __init__(self, part: ModelPart, prefix: str) -> None:
        self._gate_up, gate_up = part.gate_up(prefix, gates=True)
        self._down, down = part.rows(f"{prefix}down_proj", part.mlp_cut(part.config.intermediate_size))
        self.sites = [LinearSite(self._gate_up, gate_up), LinearSite(self._down, down)]

    def of_norm(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The MLP of norm(x + delta), which x becomes before the norm."""
        return self._down(self._gate_up.gated_of_norm(norm, x, delta))
