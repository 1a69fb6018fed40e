"""The model's own layer that predicts the token after the next (multi-token prediction, MTP): DeepSeek V3 and GLM.

    x = eh_proj [norm of the token's embedding | norm of the model's hidden state before it]
    out = norm (x + layer (x)), which the model's head reads, and a further pass in place of the hidden state

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 2.2. The model's state is that behind its last norm, as vLLM,
SGLang and transformers have it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kv.kv_pool import LAYER, TAIL, CacheSpec
from engine.layers.turns import LayerTurns
from engine.models.attention import Attend
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import Lender
from engine.models.layer import Layer
from engine.models.part import ModelPart
from engine.parallel.layout import Cut


class NextnLayer:
    """As `DraftModel`; `use` comes first. `part`: of the model, whose layers are not read yet."""

    def __init__(self, part: ModelPart) -> None:
        config, hidden = part.config, part.config.hidden_size
        index = config.num_layers
        prefix = f"model.layers.{index}."
        self._embedding_norm, self._hidden_norm = part.norm(f"{prefix}enorm"), part.norm(f"{prefix}hnorm")
        self._join, _ = part.columns([f"{prefix}eh_proj"], [Cut.whole(hidden)], inputs=2 * hidden)
        self._layer = Layer(part, index, place=0)
        self._norm = part.norm(f"{prefix}shared_head.norm")
        checkpoint = part.checkpoint
        self._turns = LayerTurns(config, range(index, index + 1), dtype=checkpoint.dtype, device=checkpoint.device)
        self._specs = [
            replace(part.cache_spec(), drafter=LAYER),
            CacheSpec(num_kv_heads=1, head_dim=hidden, dtype=checkpoint.dtype_name, drafter=TAIL),
        ]
        self._lender: Lender | None = None
        self.num_heads = len(part.share.heads)
        self.attention_needs: Sequence[str] = config.attention_needs()

    def use(self, model: DenseDecoder) -> None:
        """Take embeddings and head of `model`."""
        self._lender = Lender(model)

    @property
    def _model(self) -> DenseDecoder:
        assert self._lender is not None, "use() comes first"
        return self._lender.model

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._specs)

    def features(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, ids: Tensor, features: Tensor | None, positions: Tensor, attend: Attend) -> Tensor:
        assert features is not None
        embedded = self._embedding_norm(self._model.embedded(ids))
        x = self._join(torch.cat((embedded, self._hidden_norm(features)), 1))
        cos, sin = self._turns.at(positions)
        return self._norm.of_sum(x, self._layer(x, None, (cos, sin), attend))

    def logits(self, rows: Tensor) -> Tensor | None:
        return self._model.logits(rows)
