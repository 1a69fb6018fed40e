"""EAGLE draft layers: they read a token and the model's hidden state before it.

EAGLE    x = fc [embedding | hidden state], a layer without its first norm, the model's head
EAGLE3   f = fc [three inner hidden states]; attention reads [norm of embedding | norm of f] and
         is added to f; norm; a head of its own, often of frequent tokens

Further steps read the layer's output. arXiv:2401.15077 and arXiv:2503.01840; tensor names and norms
as in SGLang.
"""

import weakref

import torch
from torch import Tensor

from engine.kv.cache_spec import CacheSpec
from engine.layers.linear import Linear, NoNorm, add
from engine.layers.rope import LayerRopes
from engine.model_files.drafter_config import EAGLE3, DrafterConfig
from engine.model_files.head_config import family_of
from engine.models.cache_specs import reading_layer_specs
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import DraftEntries
from engine.models.layer import Attend, Attention, DenseMLP
from engine.models.layer_kinds import layer_of
from engine.models.part import ModelPart
from engine.parallel.layout import Cut
from service.flags import ConfigError


class ReadingLayer:
    """A layer that reads hidden states, with KV. `use` lends it the model's embedding and head."""

    def __init__(self, part: ModelPart, layers: range) -> None:
        config, checkpoint = part.config, part.checkpoint
        self._turns = LayerRopes(config, layers, dtype=checkpoint.dtype, device=checkpoint.device)
        self._specs = reading_layer_specs(config, part.share, dtype=checkpoint.dtype_name)
        self._lent: weakref.ref[DenseDecoder] | None = None
        self.num_heads = len(part.share.heads)
        self.attention_needs = config.attention_needs()

    def use(self, model: DenseDecoder) -> None:
        """Draft for `model`, without owning its weights."""
        self._lent = weakref.ref(model)

    @property
    def _model(self) -> DenseDecoder:
        assert self._lent is not None, "use() comes first"
        model = self._lent()
        assert model is not None, "its weights are released"
        return model

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._specs)

    def features(self, hidden: Tensor) -> Tensor:
        return hidden

    def _embedded(self, entries: DraftEntries) -> Tensor:
        hidden = self._model.embedded(entries.ids)
        for rows in entries.images:
            hidden = rows.embedded(hidden)
        return hidden

    def logits(self, rows: Tensor) -> Tensor | None:
        return self._model.logits(rows)


class EagleLayer(ReadingLayer):
    """An EAGLE or EAGLE3 drafter over `part`; `model` has embeddings and head."""

    def __init__(self, part: ModelPart, drafter: DrafterConfig, model: DenseDecoder) -> None:
        super().__init__(part, range(1))
        self.use(model)
        config, checkpoint = part.config, part.checkpoint
        prefix = "model." if checkpoint.has("model.fc.weight") else ""  # like the embeddings in the file
        layer = f"{prefix}midlayer." if drafter.kind == EAGLE3 else f"{prefix}layers.0."
        self._reads_inside = drafter.kind == EAGLE3
        inputs = len(drafter.inside) * drafter.hidden if self._reads_inside else 2 * config.hidden_size
        self._join = _linear(part, f"{prefix}fc", inputs)
        width = 2 * config.hidden_size if self._reads_inside else config.hidden_size
        self._attention = Attention(part, f"{layer}self_attn.", place=0, inputs=width)
        self._mlp_norm = part.norm(f"{layer}post_attention_layernorm")
        self._mlp = DenseMLP(part, f"{layer}{part.mlp_names.place}.")
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

    def features(self, hidden: Tensor) -> Tensor:
        return self._join(torch.cat(self._model.seen_inside(), 1)) if self._reads_inside else hidden

    def forward(self, entries: DraftEntries, attend: Attend) -> Tensor:
        features = entries.features
        assert features is not None
        embedded, (cos, sin) = self._embedded(entries), self._turns.at(entries.positions)
        if self._reads_inside:
            x = features.clone()  # it becomes the sum
            both = torch.cat((self._embedding_norm(embedded), self._hidden_norm(features)), 1)
        else:
            x = both = self._join(torch.cat((embedded, features), 1))
        delta = self._attention(NoNorm(), both, None, (cos, sin), attend)
        return add(x, self._mlp(self._mlp_norm, x, delta))

    def logits(self, rows: Tensor) -> Tensor | None:
        head = self._head or self._model
        return head.logits(self._norm(rows) if self._reads_inside else rows)


class _DraftHead:
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
        """[n, vocab] fp32, -inf for absent tokens; None except on rank 0."""
        own = self._linear.in_float32(rows)
        logits = self._collectives.gather_columns(own, columns=self._columns, total=self._count)
        if logits is None or self._ids is None:
            return logits
        all_tokens = logits.new_full((len(rows), self._vocab_size), -torch.inf)
        return all_tokens.index_copy_(1, self._ids, logits)


def _linear(part: ModelPart, name: str, inputs: int) -> Linear:
    rows = [Cut.whole(part.config.hidden_size)]
    return part.columns([name], rows, inputs=inputs, bias=part.checkpoint.has(f"{name}.bias"))[0]


class NextnLayer(ReadingLayer):
    """NextN drafter: the model's own layer for the token after the next (MTP).

    x = join [norm of the token's embedding | norm of the model's hidden state before it]
    out = norm (x + layer (x)), read by the model's head and by the next draft step

    It has attention with KV, in hybrids too. DeepSeek-V3 Technical Report (arXiv:2412.19437),
    section 2.2. Hidden states after the last norm, and `mtp.` names of hybrids, as in vLLM and
    SGLang. Call `use` first. Raises ConfigError.
    """

    def __init__(self, part: ModelPart) -> None:
        config, hidden, index = part.config, part.config.hidden_size, part.config.num_layers
        super().__init__(part, range(index, index + 1))
        names = family_of(config.architecture).nextn
        join = names.join.format(index)
        _check(part.checkpoint, join)
        self._embedding_norm, self._hidden_norm, self._norm = (
            part.norm(name.format(index)) for name in (names.embedding_norm, names.hidden_norm, names.norm)
        )
        self._join, _ = part.columns([join], [Cut.whole(hidden)], inputs=2 * hidden)
        self._layer = layer_of(part, index, place=0, prefix=names.layer.format(index))

    def forward(self, entries: DraftEntries, attend: Attend) -> Tensor:
        features = entries.features
        assert features is not None
        embedded = self._embedding_norm(self._embedded(entries))
        x = self._join(torch.cat((embedded, self._hidden_norm(features)), 1))
        cos, sin = self._turns.at(entries.positions)
        return self._norm.of_sum(x, self._layer(x, None, (cos, sin), attend))


def _check(checkpoint: Checkpoint, join: str) -> None:
    """Quantized copies often lack the layer."""
    if not checkpoint.is_dummy and not checkpoint.has(f"{join}.weight"):
        raise ConfigError(
            f"--speculative-algorithm: the checkpoint has no tensor {join}.weight, so no layer that drafts; take one that was published "
            "with its MTP layer, or give NGRAM, or leave the flag out"
        )
    if checkpoint.has("mtp.embed_tokens.weight"):
        raise ConfigError(
            "--speculative-algorithm: the MTP layer has embeddings of its own (mtp.embed_tokens.weight), which is not supported; give "
            "NGRAM, or leave the flag out"
        )
