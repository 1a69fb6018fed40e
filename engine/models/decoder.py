"""The decoder of all families; `Family` sets biases, norm positions and RoPE.

A TP rank has some heads and a part of each MLP: two all-reduces per layer. Norms and the residual
stream are replicated. With DP attention, all DP ranks divide the MLPs.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.kv.cache_spec import CacheSpec
from engine.kv.state_pool import StatePool, StateSpec
from engine.layers.linear import Addend, Embedding, Linear, LinearSite, NoNorm, Normed, SiteShape, settled
from engine.layers.recurrence import StepStates
from engine.layers.rope import LayerRopes, Turn
from engine.models.draft_model import DraftModel
from engine.models.expert_balance import ExpertBalance
from engine.models.layer import Attend, Layer
from engine.models.layer_kinds import Mixture, layer_of, mixtures_in, recurrent_in
from engine.models.part import EMBEDDING, ModelPart
from engine.models.vision.tower import NO_IMAGES, StepImages
from engine.models.vision.towers import load_tower
from engine.parallel.collectives import Collectives

Begun = tuple[torch.Tensor, ...]  # inputs of the layers: a row per token


class DenseDecoder:
    """The layers of `part`. All ranks make the same calls with the same rows.

    T tokens of any requests form one flat batch; only `attend` separates requests. `kept`: of a
    model that runs, in place of what it would load.
    """

    def __init__(self, part: ModelPart, kept: "Kept | None" = None) -> None:
        kept = kept or Kept()
        for name in kept.names:
            part.checkpoint.ignore(name)
        config, place, share = part.config, part.place, part.share
        self.config, self._share = config, share
        self.vocab_size, self.num_layers, self.num_heads = config.vocab_size, config.num_layers, len(share.heads)
        self.attention_needs = config.attention_needs()
        self.sees = config.vision is not None  # tokens may be images, on any stage
        self.collectives: Collectives = part.collectives
        self._specs = [
            part.cache_spec(window=config.windows[layer] if config.windows else 0)
            for layer in share.layers
            if config.has_kv(layer)
        ]
        self._embed, self._head = kept.ends or _ends(part)
        self._layers = [
            kept.layers.get(index)
            or layer_of(part, index, place=sum(map(config.has_kv, range(share.layers.start, index))))
            for index in share.layers
        ]
        self._calls: list[Layer | _Watched] = [*self._layers]
        self._recurrent = [mixer for layer in self._layers for mixer in recurrent_in(layer)]
        self.states: tuple[StepStates, ...] = ()  # one, of a model with recurrent layers
        self._norm: Normed = part.norm(part.final_norm) if place.is_last_stage else NoNorm()
        self._labels = part.labels()
        self.balance: ExpertBalance | None = part.balance
        self.drafter: DraftModel | None = None
        self._watched: list[_Watched] = []
        self.vision = load_tower(part)
        self._deepstack_levels = config.deepstack_levels
        part.leave_the_rest()
        self._turns = LayerRopes(config, share.layers, dtype=part.checkpoint.dtype, device=part.checkpoint.device)

    def kept(self, changed: Collection[str]) -> "Kept":
        """Return what another model shares if only tensors `changed` differ."""
        if self.balance is not None:
            return Kept()  # experts that move come from the files that their layer was loaded from
        own = zip(self._share.layers, self._layers, strict=True)
        layers = {index: layer for index, layer in own if not any(name.startswith(_place(index)) for name in changed)}
        at_ends = any(name.startswith(ENDS) for name in changed)
        names = [*map(_place, layers), *(() if at_ends else ENDS)]
        return Kept(layers, None if at_ends else (self._embed, self._head), names)

    @property
    def recordable(self) -> bool:
        """True if a step only calls our C kernels, so that a tape can record it."""
        config, numbers = self.config, self.config.arithmetic
        own = numbers.norm == "rms" and numbers.is_gated and not numbers.clip
        dense = all(map(config.is_dense, range(config.num_layers)))
        return own and dense and config.qk_norm != "whole" and not self._watched

    def cache_specs(self) -> list[CacheSpec]:
        return list(self._specs)

    def state_specs(self) -> list[StateSpec]:
        return [layer.states.spec for layer in self._recurrent]

    def product_bytes(self) -> int:
        """Bytes of a row that recurrent layers keep in steps with drafts."""
        return sum(layer.row_bytes for layer in self._recurrent)

    def use_states(self, states: StatePool) -> None:
        step = StepStates(states)
        self.states = (step,)
        for number, layer in enumerate(self._recurrent):
            layer.states.use(step, number)

    def draft_with(self, drafter: DraftModel) -> None:
        self.drafter = drafter
        self._specs += drafter.cache_specs()

    def linear_sites(self) -> list[LinearSite]:
        """LoRA sites, in the same order for all models of one shape."""
        return [site for layer in self._layers for site in layer.sites]

    def other_sites(self) -> list[SiteShape]:
        return [
            SiteShape(site.shape.in_size, tuple((_of_layer(index, name), rows) for name, rows in site.shape.parts))
            for index in range(self.config.num_layers)
            if index not in self._share.layers
            for site in self._layers[0].sites
        ]

    def mixtures(self) -> dict[int, Mixture]:
        found = zip(self._share.layers, self._layers, strict=True)
        return {index: mixture for index, layer in found for mixture in mixtures_in(layer)}

    def count_rows(self, rows: torch.Tensor | None) -> None:
        """Let loads count the first `rows` [1] i64 rows of steps; None: all."""
        for mixture in self.mixtures().values():
            mixture.count_rows(rows)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend, images: StepImages = NO_IMAGES
    ) -> torch.Tensor:
        """[T, hidden], normed after the last stage. Arguments as in `begin`."""
        return self.layers(self.begin(inputs, positions, images), attend, images)

    def begin(self, inputs: torch.Tensor, positions: torch.Tensor, images: StepImages = NO_IMAGES) -> Begun:
        """Hidden states [T, hidden] and RoPE tables.

        `inputs`: token ids [T] i64, or [T, hidden] of the stage before. `positions`: [T] or [3, T]
        (M-RoPE) i64. `images`: replace embeddings.
        """
        for states in self.states:
            states.begin()
        hidden = self._embed(inputs)
        for rows in images:
            hidden = rows.embedded(hidden)
        return hidden, *self._turns.at(positions)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden] for token ids [T] i64, first stage only."""
        return self._embed(ids)

    def watch(self, layers: tuple[int, ...]) -> None:
        """Keep inputs of `layers` in each step, for a drafter; disables tapes."""
        self._watched = [_Watched(self._layers[layer]) for layer in layers]
        for layer, watched in zip(layers, self._watched, strict=True):
            self._calls[layer] = watched

    def seen_inside(self) -> list[torch.Tensor]:
        """Inputs [T, hidden] of the watched layers in the last step."""
        return [watched.inputs for watched in self._watched]

    def pass_again(self, rows: torch.Tensor, counts: Sequence[int], slots: Sequence[int]) -> None:
        """Rerun recurrences over accepted `rows` [n] i64 of the last draft step, from its start.

        `counts`: rows per request; `slots`: their states.
        """
        for states in self.states:
            states.begin_again(counts, slots)
        for layer in self._recurrent:
            layer.pass_again(rows)

    def keep_states(self) -> Callable[[], object]:
        """Save recurrent states after `begin`; the returned function restores them."""
        kept = [states.keep() for states in self.states]
        return lambda: [put_back() for put_back in kept]

    def layers(self, begun: Begun, attend: Attend, images: StepImages = NO_IMAGES) -> torch.Tensor:
        """May modify `begun` and return a part of it."""
        x, *turns = begun
        delta: Addend | None = None
        for index, (layer, way) in enumerate(zip(self._calls, self._turns.way_of, strict=True)):
            delta = layer(x, delta, (turns[2 * way], turns[2 * way + 1]), attend)
            if index < self._deepstack_levels:
                for rows in images:
                    delta = rows.deepened(settled(delta), index)
        return self._norm.of_sum(x, delta)

    def join(self) -> None:
        """Join the MLPs of other DP ranks without own tokens."""
        for layer in self._layers:
            layer.join()

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [n, vocab] fp32 for `hidden` [n, hidden], in `out` if given.

        Only rank 0 of the last stage gets them, perhaps valid until the next call.
        """
        logits = self._head.in_float32(hidden, out=out)
        return None if logits is None else self._shaped(logits)

    def label_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, labels] fp32 of a classifier, last stage only."""
        assert len(self._labels), "the model has no labels"
        return hidden.float() @ self._labels.T

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        scale, cap = self.config.arithmetic.logit_scale, self.config.arithmetic.logit_cap
        if scale != 1.0:
            logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


ENDS = (EMBEDDING, "lm_head.weight", "lm_head.bias")


@dataclass(frozen=True, slots=True)
class Kept:
    """Parts of a running model. `names`: of their tensors, or with a dot the beginnings."""

    layers: Mapping[int, Layer] = field(default_factory=dict)
    ends: "tuple[Callable[[torch.Tensor], torch.Tensor], VocabHead] | None" = None
    names: Sequence[str] = ()


def _place(index: int) -> str:
    return f"model.layers.{index}."


def _of_layer(index: int, name: str) -> str:
    return re.sub(r"^model\.layers\.\d+\.", f"model.layers.{index}.", name)


class _Watched:
    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.inputs = torch.empty(0)  # [T, hidden] of the last step

    def __call__(self, x: torch.Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Addend:
        delta = settled(delta)
        self.inputs = x.clone() if delta is None else x + delta
        return self._layer(x, delta, turn, attend)


# ---- Both ends of a stage: token ids or hidden states come in, logits or hidden states go out.


class VocabHead(Protocol):
    def in_float32(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [n, vocab] fp32 of `x` [n, hidden], in `out` if given; only on rank 0."""


def _ends(part: ModelPart) -> tuple[Callable[[torch.Tensor], torch.Tensor], VocabHead]:
    config, place = part.config, part.place
    embed: Callable[[torch.Tensor], torch.Tensor] = _received
    tied = config.tie_word_embeddings and config.generates and place.is_last_stage
    if place.is_first_stage or tied:
        table = part.table(EMBEDDING)
        if place.is_first_stage:
            scale = torch.tensor(config.arithmetic.embedding_scale, dtype=part.checkpoint.dtype).item()
            embed = Embedding(table, own=part.share.vocab, scale=scale, collectives=part.collectives)
        if tied:
            return embed, _over_ranks(part, part.head(tied=[table]))
    if not place.is_last_stage:
        return embed, NoHead(0)
    return embed, _over_ranks(part, part.head() if config.generates else NoHead(len(part.share.vocab)))


def _received(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _over_ranks(part: ModelPart, head: "Linear | NoHead") -> VocabHead:
    return head if part.collectives.size == 1 else DividedHead(part, head)


class DividedHead:
    def __init__(self, part: ModelPart, own: "Linear | NoHead") -> None:
        self._own, self._collectives = own, part.collectives
        self._columns, self._total = part.share.vocab, part.config.vocab_size

    def in_float32(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
        own = self._own.in_float32(x)
        logits = self._collectives.gather_columns(own, columns=self._columns, total=self._total)
        return logits if logits is None or out is None else out.copy_(logits)


class NoHead:
    """A head that computes nothing, for models that cannot generate, and for earlier stages."""

    def __init__(self, width: int) -> None:
        self._width = width

    def in_float32(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(x), self._width, device=x.device) if out is None else out.zero_()
