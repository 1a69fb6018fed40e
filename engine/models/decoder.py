"""The decoder of all families; `Family` sets biases, norm positions and RoPE.

A TP rank has some heads and a part of each MLP: two all-reduces per layer. Norms and the residual
stream are replicated. With DP attention, all DP ranks divide the MLPs.
"""

import re
from collections.abc import Callable, Sequence

import torch

from engine.kv.cache_spec import CacheSpec
from engine.kv.state_pool import StatePool, StateSpec
from engine.layers.linear import Embedding, LinearSite, SiteShape
from engine.layers.norm import add
from engine.layers.recurrence import StepStates
from engine.layers.rope import LayerRopes
from engine.models.attention import Attend
from engine.models.draft_model import DraftModel
from engine.models.expert_balance import ExpertBalance
from engine.models.layer import Layer, Mixture
from engine.models.part import EMBEDDING, ModelPart
from engine.models.vision.tower import ImageRows
from engine.models.vision.towers import load_tower
from engine.parallel.collectives import Collectives

Begun = tuple[torch.Tensor, ...]  # inputs of the layers: a row per token


class DenseDecoder:
    """The layers of `part`. All ranks make the same calls with the same rows.

    T tokens of any requests form one flat batch; only `attend` separates requests.
    """

    def __init__(self, part: ModelPart) -> None:
        config, place, share = part.config, part.place, part.share
        self._config, self._share, self._collectives = config, share, part.collectives
        self._specs = [
            part.cache_spec(window=config.windows[layer] if config.windows else 0)
            for layer in share.layers
            if config.has_kv(layer)
        ]
        tied = config.tie_word_embeddings and config.generates
        table = part.table(EMBEDDING) if place.is_first_stage or (tied and place.is_last_stage) else None
        self._embedding = self._norm = self._head = self._labels = None
        if place.is_first_stage:
            assert table is not None
            self._embedding = Embedding(table, own=share.vocab, collectives=part.collectives)
        self._embedding_scale = _rounded(config.arithmetic.embedding_scale, part.checkpoint.dtype)
        self._layers = [
            Layer(part, index, place=sum(map(config.has_kv, range(share.layers.start, index))))
            for index in share.layers
        ]
        self._recurrent = [layer.recurrent for layer in self._layers if layer.recurrent is not None]
        self._states: StepStates | None = None
        if place.is_last_stage:
            self._norm = part.last_norm()
            self._head = part.head(table if tied else None) if config.generates else NoHead(len(share.vocab))
            self._labels = label_matrix(part)
        self._balance = part.balance
        self.drafter: DraftModel | None = None
        self._watched: tuple[int, ...] = ()
        self._seen_inside: dict[int, torch.Tensor] = {}
        self.vision = load_tower(part)
        self._deepstack_levels = 0 if config.vision is None else config.vision.deepstack_levels
        part.leave_the_rest()
        self._turns = LayerRopes(config, share.layers, dtype=part.checkpoint.dtype, device=part.checkpoint.device)

    @property
    def recordable(self) -> bool:
        """True if a step only calls our C kernels, so that a tape can record it."""
        config, numbers = self._config, self._config.arithmetic
        own = numbers.norm == "rms" and numbers.is_gated and not numbers.clip
        return own and config.qk_norm != "whole" and config.experts is None and not self.is_watched

    @property
    def attention_needs(self) -> tuple[str, ...]:
        return self._config.attention_needs()

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._specs) + ([] if self.drafter is None else self.drafter.cache_specs())

    def state_specs(self) -> list[StateSpec]:
        return [layer.states.spec for layer in self._recurrent]

    def use_states(self, states: StatePool) -> None:
        self._states = StepStates(states)
        for number, layer in enumerate(self._recurrent):
            layer.states.use(self._states, number)

    def linear_sites(self) -> list[LinearSite]:
        """LoRA sites, in the same order for all models of one shape."""
        return [site for layer in self._layers for site in layer.sites]

    def other_sites(self) -> list[SiteShape]:
        return [
            SiteShape(site.shape.in_size, tuple((_of_layer(index, name), rows) for name, rows in site.shape.parts))
            for index in range(self._config.num_layers)
            if index not in self._share.layers
            for site in self._layers[0].sites
        ]

    @property
    def collectives(self) -> Collectives | None:
        return self._collectives

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    @property
    def balance(self) -> ExpertBalance | None:
        return self._balance

    def mixtures(self) -> dict[int, Mixture]:
        found = zip(self._share.layers, (layer.mixture for layer in self._layers), strict=True)
        return {index: mixture for index, mixture in found if mixture is not None}

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend, images: ImageRows | None = None
    ) -> torch.Tensor:
        """Return [T, hidden], normed after the last stage. Arguments as in `begin`."""
        return self.layers(self.begin(inputs, positions, images), attend, images)

    def begin(self, inputs: torch.Tensor, positions: torch.Tensor, images: ImageRows | None = None) -> Begun:
        """Return hidden states [T, hidden] and RoPE tables.

        `inputs`: token ids [T] i64, or [T, hidden] of the stage before. `positions`: [T] or [3, T]
        (M-RoPE) i64. `images`: replace embeddings.
        """
        if self._states is not None:
            self._states.begin()
        hidden = inputs if self._embedding is None else self.embedded(inputs)
        if images is not None:
            assert self.vision is not None, "the first stage of a model that sees has images"
            hidden = images.embedded(hidden)
        return hidden, *self._turns.at(positions)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden] for token ids [T] i64, first stage only."""
        assert self._embedding is not None
        rows = self._embedding(ids)
        return rows if self._embedding_scale == 1.0 else rows.mul_(self._embedding_scale)

    def watch(self, layers: tuple[int, ...]) -> None:
        """Keep inputs of `layers` in each step, for a drafter; disables recording."""
        self._watched = layers

    @property
    def is_watched(self) -> bool:
        return bool(self._watched)

    def seen_inside(self) -> list[torch.Tensor]:
        return [self._seen_inside[layer] for layer in self._watched]

    @property
    def states(self) -> StepStates | None:
        return self._states

    def pass_again(self, rows: torch.Tensor, counts: Sequence[int], slots: torch.Tensor) -> None:
        """Rerun recurrences over accepted `rows` [n] i64 of the last draft step, from its start.

        `counts`: rows per request; `slots` [requests] i32: states.
        """
        assert self._states is not None, "use_states() comes first"
        self._states.begin_again(counts, slots)
        for layer in self._recurrent:
            layer.pass_again(rows)

    def keep_states(self) -> Callable[[], object]:
        """Save recurrent states after `begin`; the returned function restores them."""
        return (lambda: None) if self._states is None else self._states.keep()

    def layers(self, begun: Begun, attend: Attend, images: ImageRows | None = None) -> torch.Tensor:
        """Run the layers; may modify `begun` and return a part of it."""
        x, *turns = begun
        delta = None
        for index, (layer, way) in enumerate(zip(self._layers, self._turns.way_of, strict=True)):
            if index in self._watched:
                self._seen_inside[index] = x.clone() if delta is None else x + delta
            delta = layer(x, delta, (turns[2 * way], turns[2 * way + 1]), attend)
            if images is not None and index < self._deepstack_levels:
                delta = images.deepened(delta, index)
        if self._norm is not None:
            return self._norm.of_sum(x, delta)
        assert delta is not None, "a stage has a layer"
        return add(x, delta)

    def join(self) -> None:
        """Join the MLPs of other DP ranks without own tokens."""
        for layer in self._layers:
            layer.join()

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return logits [n, vocab] fp32 for `hidden` [n, hidden], in `out` if given.

        Only rank 0 of the last stage gets them, perhaps valid until the next call.
        """
        assert self._head is not None, "the last stage has the head"
        if self._collectives is None:
            return self._shaped(self._head.in_float32(hidden, out=out))
        columns, total = self._share.vocab, self._config.vocab_size
        logits = self._collectives.gather_columns(self._head.in_float32(hidden), columns=columns, total=total)
        if logits is None:
            return None
        return self._shaped(logits if out is None else out.copy_(logits))

    def label_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [n, labels] fp32 of a classifier, last stage only."""
        assert self._labels is not None, "the model has no labels"
        return hidden.float() @ self._labels.T

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        scale, cap = self._config.arithmetic.logit_scale, self._config.arithmetic.logit_cap
        if scale != 1.0:
            logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype).item()


def _of_layer(index: int, name: str) -> str:
    return re.sub(r"^model\.layers\.\d+\.", f"model.layers.{index}.", name)


class NoHead:
    """A head without logits, for models that cannot generate."""

    def __init__(self, width: int) -> None:
        self._width = width

    def in_float32(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(x), self._width, device=x.device) if out is None else out.zero_()


def label_matrix(part: ModelPart) -> torch.Tensor | None:
    count = len(part.config.head.labels)
    shape = [count, part.config.hidden_size]
    return part.checkpoint.take("score.weight", shape, dtype=torch.float32) if count else None
