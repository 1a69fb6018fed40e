"""What a model drafts with: another, smaller one, whose tokens it verifies (engine/executor/draft_pass.py).

STANDALONE   a model of its own with the same vocabulary: it reads tokens alone
NEXTN        layers of the model's own checkpoint that predict the token after the next (MTP)
EAGLE        a layer that reads a token and the model's hidden state before it
EAGLE3       the same, of hidden states inside the model
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from engine.kv.cache_spec import LAYER, CacheSpec
from engine.models.attention import Attend
from engine.models.vision.tower import ImageRows

if TYPE_CHECKING:
    from engine.models.decoder import DenseDecoder


class DraftModel(Protocol):
    """`num_heads`: query heads of its layers on this rank. `attention_needs`: as `make_attention_backend` takes them."""

    @property
    def num_heads(self) -> int: ...

    @property
    def attention_needs(self) -> Sequence[str]: ...

    def cache_specs(self) -> list[CacheSpec]:
        """Of its layers on this rank, and behind them of its tail, if it reads hidden states."""

    def features(self, hidden: Tensor) -> Tensor | None:
        """[T, size] of what it reads of the step whose `hidden` states [T, H] the model has just computed; None: nothing."""

    def forward(
        self,
        ids: Tensor,
        features: Tensor | None,
        positions: Tensor,
        attend: Attend,
        images: ImageRows | None = None,
    ) -> Tensor:
        """[T, size] for tokens `ids` [T] i64 and the features of the tokens before them; `attend`: of its own layers. `images`: what
        stands in for embeddings that it takes from the model.

        A row is the features of the next token, for a further pass, and what `logits` takes.
        """

    def logits(self, rows: Tensor) -> Tensor | None:
        """[n, vocab] float32 for `rows` [n, size] of `forward`; None but on rank 0."""


class Lender:
    """The model that lends a drafter embeddings and head. It holds the drafter, so a drafter does not keep its weights."""

    def __init__(self, model: "DenseDecoder") -> None:
        self._model = weakref.ref(model)

    @property
    def model(self) -> "DenseDecoder":
        model = self._model()
        assert model is not None, "its weights are released"
        return model

    def embedded(self, ids: Tensor, images: ImageRows | None) -> Tensor:
        """[T, hidden] for token ids [T] i64, as the model's layers get them."""
        rows = self.model.embedded(ids)
        return rows if images is None else images.embedded(rows)


class StandaloneModel:
    """A drafter that is a model of its own: it reads tokens alone, and keeps K and V of all its layers.

    `num_heads`: of `model` on this rank.
    """

    def __init__(self, model: "DenseDecoder", *, num_heads: int) -> None:
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
