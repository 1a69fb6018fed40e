"""NextN drafter: the model's own layer for the token after the next (MTP).

x = join [norm of the token's embedding | norm of the model's hidden state before it]
out = norm (x + layer (x)), read by the model's head and by the next draft step

It has attention with KV, in hybrids too. DeepSeek-V3 Technical Report (arXiv:2412.19437), section
2.2. Hidden states after the last norm, and `mtp.` names of hybrids, as in vLLM and SGLang.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv.cache_spec import CacheSpec
from engine.layers.turns import LayerTurns
from engine.model_files.head_config import family_of
from engine.models.attention import Attend
from engine.models.cache_specs import reading_layer_specs
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import Lender
from engine.models.layer import Layer
from engine.models.part import ModelPart
from engine.models.vision.tower import ImageRows
from engine.parallel.layout import Cut
from service.flags import ConfigError


class NextnLayer:
    """A NextN `DraftModel` over the model's `part`; call `use` first. Raises ConfigError."""

    def __init__(self, part: ModelPart) -> None:
        config, checkpoint, hidden = part.config, part.checkpoint, part.config.hidden_size
        index, names = config.num_layers, family_of(config.architecture).nextn
        join = names.join.format(index)
        _check(checkpoint, join)
        self._embedding_norm, self._hidden_norm, self._norm = (
            part.norm(name.format(index)) for name in (names.embedding_norm, names.hidden_norm, names.norm)
        )
        self._join, _ = part.columns([join], [Cut.whole(hidden)], inputs=2 * hidden)
        self._layer = Layer(part, index, place=0, prefix=names.layer.format(index))
        self._turns = LayerTurns(config, range(index, index + 1), dtype=checkpoint.dtype, device=checkpoint.device)
        self._specs = reading_layer_specs(config, part.share, dtype=checkpoint.dtype_name)
        self._lender: Lender | None = None
        self.num_heads = len(part.share.heads)
        self.attention_needs: Sequence[str] = config.attention_needs()

    def use(self, model: DenseDecoder) -> None:
        self._lender = Lender(model)

    @property
    def _model(self) -> DenseDecoder:
        assert self._lender is not None, "use() comes first"
        return self._lender.model

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._specs)

    def features(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(
        self,
        ids: Tensor,
        features: Tensor | None,
        positions: Tensor,
        attend: Attend,
        images: ImageRows | None = None,
    ) -> Tensor:
        assert features is not None
        assert self._lender is not None, "use() comes first"
        embedded = self._embedding_norm(self._lender.embedded(ids, images))
        x = self._join(torch.cat((embedded, self._hidden_norm(features)), 1))
        cos, sin = self._turns.at(positions)
        return self._norm.of_sum(x, self._layer(x, None, (cos, sin), attend))

    def logits(self, rows: Tensor) -> Tensor | None:
        return self._model.logits(rows)


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
