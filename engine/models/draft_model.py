"""Draft models, whose tokens the model verifies (engine/speculative/draft_pass.py).

STANDALONE   a separate model with the same vocabulary
NEXTN        layers in the model's checkpoint that predict the token after the next (MTP)
EAGLE        a layer that reads a token and the model's hidden state before it
EAGLE3       the same with hidden states of inner layers
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from engine.kv.cache_spec import LAYER, CacheSpec
from engine.models.layer import Attend
from engine.models.vision.tower import NO_IMAGES, StepImages

if TYPE_CHECKING:
    from engine.models.decoder import DenseDecoder


class DraftEntries(NamedTuple):
    """Inputs of a draft step: `ids` [T] i64, `features` of the tokens before them, if read.

    `images`: replace embeddings.
    """

    ids: Tensor
    features: Tensor | None
    positions: Tensor
    images: StepImages = NO_IMAGES


class DraftModel(Protocol):
    """`num_heads`: query heads on this rank."""

    @property
    def num_heads(self) -> int: ...

    @property
    def attention_needs(self) -> Sequence[str]: ...

    def cache_specs(self) -> list[CacheSpec]:
        """KV layouts on this rank, then that of hidden states, if it reads them."""

    def features(self, hidden: Tensor) -> Tensor | None:
        """Its input [T, size] from the model's latest `hidden` [T, H], if any."""

    def forward(self, entries: DraftEntries, attend: Attend) -> Tensor:
        """[T, size]: a row is the input of `logits` and the next draft step's features."""

    def logits(self, rows: Tensor) -> Tensor | None:
        """[n, vocab] fp32 for `rows` [n, size]; None except on rank 0."""


class StandaloneModel:
    def __init__(self, model: "DenseDecoder") -> None:
        self._model = model
        self.num_heads, self.attention_needs = model.num_heads, model.attention_needs

    def cache_specs(self) -> list[CacheSpec]:
        return [replace(spec, drafter=LAYER) for spec in self._model.cache_specs()]

    def features(self, hidden: Tensor) -> Tensor | None:
        return None

    def forward(self, entries: DraftEntries, attend: Attend) -> Tensor:
        return self._model.forward(entries.ids, entries.positions, attend)

    def logits(self, rows: Tensor) -> Tensor | None:
        return self._model.logits(rows)
