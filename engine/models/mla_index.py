"""The index of DeepSeek V3.2's sparse attention: small queries and keys of its own, which choose the tokens that attention sees.

Its products are rows of the layer's own matrices: key and weights of heads beside the latents, queries beside q. All ranks have all of
it. Its RoPE pairs dims (i, i + rope_dim / 2), independent of attention's; in GLM-5 (2 i, 2 i + 1), which are put in that order here.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.latents import TokenChooser
from engine.layers.rope import Turn, apply_rope
from engine.model_files.latent_config import IndexConfig
from engine.models.part import ModelPart
from engine.parallel.layout import Cut

EPS = 1e-6


class Index:
    """`down_names`, `down_cuts`: of its matrices that multiply the hidden state; `up_names`, `up_cuts`: q's vector."""

    def __init__(self, part: ModelPart, prefix: str, index: IndexConfig) -> None:
        self._index = index
        self._turned = part.config.rope.dim
        self._norm = [part.checkpoint.take(f"{prefix}k_norm.{name}", [index.dim]) for name in ("weight", "bias")]
        self.down_names = [f"{prefix}wk", f"{prefix}weights_proj"]
        self.down_cuts = [Cut.whole(index.dim), Cut.whole(index.heads)]
        self.up_names = [f"{prefix}wq_b"]
        self.up_cuts = [Cut.whole(index.heads * index.dim)]

    def __call__(self, q: Tensor, key: Tensor, weights: Tensor, *, turn: Turn) -> tuple[Tensor, TokenChooser]:
        """(key [T, dim] for the cache, what chooses) of the products: q [T, heads * dim], key [T, dim], weights [T, heads]."""
        index = self._index
        key = functional.layer_norm(key.contiguous(), key.shape[1:], *self._norm, eps=EPS)
        both = torch.cat((q.reshape(len(q), index.heads, index.dim), key.unsqueeze(1)), 1)
        turned, plain = both[:, :, : self._turned], both[:, :, self._turned :]
        if index.interleaved:  # scores do not see an order that queries and keys share
            turned = torch.cat((turned[:, :, ::2], turned[:, :, 1::2]), 2)
        both = torch.cat((apply_rope(turned, *turn), plain), 2)
        scaled = weights.float() * (index.heads * index.dim) ** -0.5
        return both[:, -1], TokenChooser(both[:, :-1], scaled, index.chosen)
