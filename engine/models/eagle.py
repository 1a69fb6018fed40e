"""EAGLE draft layers: they read a token and the model's hidden state before it.

EAGLE    x = fc [embedding | hidden state], a layer without its first norm, the model's head
EAGLE3   f = fc [three inner hidden states]; attention reads [norm of embedding | norm of f] and
         is added to f; norm; a head of its own, often of frequent tokens

Further steps read the layer's output. arXiv:2401.15077 and arXiv:2503.01840; tensor names and norms
as in SGLang.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv.cache_spec import CacheSpec
from engine.layers.linear import Linear
from engine.layers.norm import NoNorm, add
from engine.layers.turns import LayerTurns
from engine.model_files.drafter_config import EAGLE3, DrafterConfig
from engine.models.attention import Attend, Attention
from engine.models.cache_specs import reading_layer_specs
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import Lender
from engine.models.layer import DenseMLP
from engine.models.part import ModelPart
from engine.models.vision.tower import ImageRows
from engine.parallel.layout import Cut


class EagleLayer:
    """An EAGLE or EAGLE3 drafter over `part`; `model` has embeddings and head."""

    def __init__(self, part: ModelPart, drafter: DrafterConfig, model: DenseDecoder) -> None:
        config, checkpoint = part.config, part.checkpoint
        prefix = "model." if checkpoint.has("model.fc.weight") else ""  # like the embeddings in the file
        layer = f"{prefix}midlayer." if drafter.kind == EAGLE3 else f"{prefix}layers.0."
        self._lender = Lender(model)
        self._reads_inside = drafter.kind == EAGLE3
        inputs = len(drafter.inside) * drafter.hidden if self._reads_inside else 2 * config.hidden_size
        self._join = _linear(part, f"{prefix}fc", inputs)
        width = 2 * config.hidden_size if self._reads_inside else config.hidden_size
        self._attention = Attention(part, f"{layer}self_attn.", place=0, inputs=width)
        self._mlp_norm = part.norm(f"{layer}post_attention_layernorm")
        self._mlp = DenseMLP(part, f"{layer}{part.mlp_names.place}.")
        self._turns = LayerTurns(config, range(1), dtype=checkpoint.dtype, device=checkpoint.device)
        if self._reads_inside:
            self._embedding_norm, self._hidden_norm = (
                part.norm(f"{layer}{name}") for name in ("input_layernorm", "hidden_norm")
            )
            self._norm = part.norm(f"{prefix}norm")
            model.watch(drafter.inside)
        own_head = self._reads_inside and checkpoint.has(f"{prefix}lm_head.weight")
        self._head = _DraftHead(part, drafter, model, prefix) if own_head else None
        for lent in ("embed_tokens.weight", "lm_head.weight", "t2d"):  # copies; t2d follows from d2t
            checkpoint.ignore(f"{prefix}{lent}")
            checkpoint.ignore(lent)
        self._specs = reading_layer_specs(config, part.share, dtype=checkpoint.dtype_name)
        self.num_heads = len(part.share.heads)
        self.attention_needs: Sequence[str] = config.attention_needs()

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._specs)

    def features(self, hidden: Tensor) -> Tensor:
        return self._join(torch.cat(self._lender.model.seen_inside(), 1)) if self._reads_inside else hidden

    def forward(
        self,
        ids: Tensor,
        features: Tensor | None,
        positions: Tensor,
        attend: Attend,
        images: ImageRows | None = None,
    ) -> Tensor:
        assert features is not None
        embedded, (cos, sin) = self._lender.embedded(ids, images), self._turns.at(positions)
        if self._reads_inside:
            x = features.clone()  # it becomes the sum
            both = torch.cat((self._embedding_norm(embedded), self._hidden_norm(features)), 1)
        else:
            x = both = self._join(torch.cat((embedded, features), 1))
        delta = self._attention(NoNorm(), both, None, (cos, sin), attend)
        return add(x, self._mlp(self._mlp_norm, x, delta))

    def logits(self, rows: Tensor) -> Tensor | None:
        head = self._head or self._lender.model
        return head.logits(self._norm(rows) if self._reads_inside else rows)


class _DraftHead:
    """A head over the tokens `ids` only."""

    def __init__(self, part: ModelPart, drafter: DrafterConfig, model: DenseDecoder, prefix: str) -> None:
        count, place = drafter.head_rows, part.place
        self._columns = range(count * place.tp_rank // place.tp_size, count * (place.tp_rank + 1) // place.tp_size)
        self._count, self._vocab_size, self._collectives = count, model.vocab_size, part.collectives
        weight = part.checkpoint.take(f"{prefix}lm_head.weight", [Cut(count, self._columns), part.config.hidden_size])
        self._linear = Linear(weight)
        self._ids: Tensor | None = None
        if part.checkpoint.has(f"{prefix}d2t"):  # offset of each id to that of the model
            shifts = part.checkpoint.take_ids(f"{prefix}d2t", count)
            self._ids = torch.arange(count, device=shifts.device) + shifts

    def logits(self, rows: Tensor) -> Tensor | None:
        """Return [n, vocab] fp32, -inf for absent tokens; None except on rank 0."""
        logits = self._linear.in_float32(rows)
        if self._collectives is not None:
            gathered = self._collectives.gather_columns(logits, columns=self._columns, total=self._count)
            if gathered is None:
                return None
            logits = gathered
        if self._ids is None:
            return logits
        all_tokens = logits.new_full((len(rows), self._vocab_size), -torch.inf)
        return all_tokens.index_copy_(1, self._ids, logits)


def _linear(part: ModelPart, name: str, inputs: int) -> Linear:
    rows = [Cut.whole(part.config.hidden_size)]
    return part.columns([name], rows, inputs=inputs, bias=part.checkpoint.has(f"{name}.bias"))[0]
