"""Multi-head latent attention (MLA) in absorbed form (DeepSeek-V2, arXiv:2405.04434).

x -> q vector | latent | k rotary part               one product
q of a head = [W_uk^T plain part | rotary part]      q . [latent | rotary k] is its score
output of a head = W_uv (weighted sum of latents)

All heads share a cache of [normed latent | rotary k | index key, if any], for prefill and decode. A
rank has some heads and all latents.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.latents import HeadProducts, NewLatents, TokenChooser
from engine.layers.linear import Addend, Linear, LinearSite, Normed, RMSNorm
from engine.layers.rope import Turn, apply_rope, head_order
from engine.model_files.latent_config import IndexConfig, LatentConfig
from engine.models.layer import Attend
from engine.models.part import ModelPart
from engine.parallel.layout import Cut

EPS = 1e-6  # of the inner norms; the config's is for the others


class LatentAttention:
    """MLA, called like `Attention`. LoRA adapts all matrices except the split kv_b_proj."""

    def __init__(self, part: ModelPart, prefix: str, *, place: int) -> None:
        latent = part.config.latent
        assert latent is not None
        self._layer, self._latent = place, latent
        heads = Cut(part.config.num_heads, part.share.heads)
        self._heads = len(heads)
        queries = heads.times(latent.query_dim)
        rotated_last = _query_order(part, latent, heads=len(heads))
        first = Cut.whole(latent.q_rank) if latent.q_rank else queries
        self._begin_dim = len(first)
        name = "q_a_proj" if latent.q_rank else "q_proj"
        order = (
            *(range(len(first)) if latent.q_rank else rotated_last),
            *(len(first) + row for row in _order(part, plain=latent.rank)),
        )
        names, cuts = [f"{prefix}{name}", f"{prefix}kv_a_proj_with_mqa"], [first, Cut.whole(latent.read_dim)]
        up_names, up_cuts = [f"{prefix}q_b_proj"], [queries]
        self._index: Index | None = None
        if latent.index is not None:
            self._index = Index(part, f"{prefix}indexer.", latent.index)
            names, cuts = [*names, *self._index.down_names], [*cuts, *self._index.down_cuts]
            up_names, up_cuts = [*up_names, *self._index.up_names], [*up_cuts, *self._index.up_cuts]
            order = (*order, *range(len(order), sum(map(len, cuts))))
            rotated_last = (*rotated_last, *range(len(rotated_last), sum(map(len, up_cuts))))
        self._index_dims = [] if latent.index is None else [latent.index.dim, latent.index.heads]
        self._down, down = part.columns(names, cuts, order=order)
        self.sites = [LinearSite(self._down, down)]
        self._up_norm: RMSNorm | None = None
        self._up: Linear | None = None
        if latent.q_rank:
            self._up_norm = _norm(part, f"{prefix}q_a_layernorm.weight", latent.q_rank)
            self._up, up = part.columns(up_names, up_cuts, order=rotated_last, inputs=latent.q_rank)
            self.sites.append(LinearSite(self._up, up))
        self._latent_norm = _norm(part, f"{prefix}kv_a_layernorm.weight", latent.rank)
        self._keys, self._values = _both(part, f"{prefix}kv_b_proj.weight", latent, heads)
        self._out, out = part.rows(f"{prefix}o_proj", heads.times(latent.value_dim))
        self.sites.append(LinearSite(self._out, out))

    def __call__(self, norm: Normed, x: Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Tensor:
        latent, down = self._latent, self._down.of_norm(norm, x, delta)
        q, latents, *indexed = torch.split(down, [self._begin_dim, latent.read_dim, *self._index_dims], dim=1)
        if self._up is not None and self._up_norm is not None:
            q = self._up(self._up_norm.of_columns(q))
        own = self._heads * latent.query_dim
        heads, index_q = q[:, :own].unflatten(1, (self._heads, latent.query_dim)), q[:, own:]
        plain, rotary = torch.split(heads, [latent.plain_dim, latent.rope_dim], dim=2)
        index = None if self._index is None else self._index(index_q, *indexed, turn=turn)
        absorbed = self._keys(plain, room=latent.rope_dim)
        new = NewLatents(absorbed, rotary, latents, self._latent_norm, turn, latent.scale, index)
        sums = attend(self._layer, new).view(-1, self._heads, latent.rank)
        return self._out(self._values(sums).flatten(1))


def _norm(part: ModelPart, name: str, width: int) -> RMSNorm:
    return RMSNorm(part.checkpoint.take(name, [width]), eps=EPS)


def _both(part: ModelPart, name: str, latent: LatentConfig, heads: Cut) -> tuple[HeadProducts, HeadProducts]:
    size = latent.plain_dim + latent.value_dim
    weight = part.checkpoint.take(name, [heads.times(size), latent.rank]).view(-1, size, latent.rank)
    keys, values = torch.split(weight, [latent.plain_dim, latent.value_dim], dim=1)
    return HeadProducts([matrix.t() for matrix in keys]), HeadProducts(list(values))


def _order(part: ModelPart, *, plain: int) -> tuple[int, ...]:
    dim = part.config.rope.dim
    return (*range(plain), *(plain + row for row in head_order(part.config.rope, dim) or range(dim)))


def _query_order(part: ModelPart, latent: LatentConfig, *, heads: int) -> tuple[int, ...]:
    of_one = _order(part, plain=latent.plain_dim)
    return tuple(head * latent.query_dim + row for head in range(heads) for row in of_one)


class Index:
    """The indexer of DeepSeek V3.2's sparse attention: chooses the tokens that attention reads.

    Its queries and keys are rows of the layer's own matrices: key and head weights with the
    latents, queries with q. It is replicated. Its RoPE pairs dims (i, i + rope_dim / 2),
    independent of attention's; GLM-5 pairs (2 i, 2 i + 1), reordered here.
    """

    def __init__(self, part: ModelPart, prefix: str, index: IndexConfig) -> None:
        self._index = index
        self._turned = part.config.rope.dim
        self._norm = [part.checkpoint.take(f"{prefix}k_norm.{name}", [index.dim]) for name in ("weight", "bias")]
        self.down_names = [f"{prefix}wk", f"{prefix}weights_proj"]
        self.down_cuts = [Cut.whole(index.dim), Cut.whole(index.heads)]
        self.up_names = [f"{prefix}wq_b"]
        self.up_cuts = [Cut.whole(index.heads * index.dim)]

    def __call__(self, q: Tensor, key: Tensor, weights: Tensor, *, turn: Turn) -> tuple[Tensor, TokenChooser]:
        """The key [T, dim] for the cache, and the chooser.

        `q`: [T, heads * dim]; `weights`: [T, heads].
        """
        index = self._index
        key = functional.layer_norm(key.contiguous(), key.shape[1:], *self._norm, eps=EPS)
        both = torch.cat((q.reshape(len(q), index.heads, index.dim), key.unsqueeze(1)), 1)
        turned, plain = both[:, :, : self._turned], both[:, :, self._turned :]
        if index.interleaved:  # scores do not depend on an order that queries and keys share
            turned = torch.cat((turned[:, :, ::2], turned[:, :, 1::2]), 2)
        both = torch.cat((apply_rope(turned, *turn), plain), 2)
        scaled = weights.float() * (index.heads * index.dim) ** -0.5
        return both[:, -1], TokenChooser(both[:, :-1], scaled, index.chosen)
