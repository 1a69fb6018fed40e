"""A drafter that is a model of its own: it reads tokens alone, and keeps K and V of all its layers."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.kv.cache_spec import LAYER, CacheSpec
from engine.models.attention import Attend
from engine.models.decoder import DenseDecoder
from engine.models.vision.tower import ImageRows


class StandaloneModel:
    """As `DraftModel`. `num_heads`: of `model` on this rank."""

    def __init__(self, model: DenseDecoder, *, num_heads: int) -> None:
        self._model = model
        self.num_heads = num_heads

    @property
    def attention_needs(self) -> Sequence[str]:
        return self._model.attention_needs

    def cache_specs(self) -> list[CacheSpec]:
        return [replace(spec, drafter=LAYER) for spec in self._model.cache_specs()]

    def features(self, hidden: Tensor) -> Tensor | None:
        return None

    def forward(
        self,
        ids: Tensor,
        features: Tensor | None,
        positions: Tensor,
        attend: Attend,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Compute hidden states of text alone; `images` are ignored."""
        return self._model.forward(ids, positions, attend)

    def logits(self, rows: Tensor) -> Tensor | None:
        return self._model.logits(rows)
