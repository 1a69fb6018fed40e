"""The dense decoder of all families; they differ in biases, in where norms stand, and in how q and k turn (`Family`).

A rank has its stage's layers, and of each layer some heads and a part of the MLP: two sums over the stage's ranks a layer. Norms and
the residual stream are the same on all of them. With DP attention the MLPs are those of all DP ranks (`SharedMLP`).
"""

import re
from collections.abc import Callable, Sequence

import torch

from engine.kv.cache_spec import CacheSpec
from engine.kv.state_pool import StatePool, StateSpec
from engine.layers.embedding import Embedding
from engine.layers.linear import LinearSite, SiteShape
from engine.layers.norm import add
from engine.layers.recurrence import StepStates
from engine.layers.turns import LayerTurns
from engine.models.attention import Attend
from engine.models.draft_model import DraftModel
from engine.models.expert_balance import ExpertBalance
from engine.models.layer import Layer, Mixture
from engine.models.part import EMBEDDING, ModelPart
from engine.models.vision.load import load_tower
from engine.models.vision.tower import ImageRows
from engine.parallel.collectives import Collectives

Begun = tuple[torch.Tensor, ...]  # what the layers start from: a row for each token


class DenseDecoder:
    """Pre-norm attention and gated MLP, for each layer of `part`.

    T tokens of any requests are one flat batch: only `attend` separates requests. Ranks call the same methods with the same rows.
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
        self._turns = LayerTurns(config, share.layers, dtype=part.checkpoint.dtype, device=part.checkpoint.device)

    @property
    def recordable(self) -> bool:
        """Whether a step of it can be calls of our C kernels alone."""
        config, numbers = self._config, self._config.arithmetic
        own = numbers.norm == "rms" and numbers.is_gated and not numbers.clip
        return own and config.qk_norm != "whole" and config.experts is None and not self.is_watched

    @property
    def attention_needs(self) -> tuple[str, ...]:
        """Return the needs of attention for `make_attention_backend`."""
        return self._config.attention_needs()

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def cache_specs(self) -> list[CacheSpec]:
        """Return the specs of the rank's layers and KV heads, and of its drafter."""
        return list(self._specs) + ([] if self.drafter is None else self.drafter.cache_specs())

    def state_specs(self) -> list[StateSpec]:
        """Return the specs of the rank's recurrent layers, in order."""
        return [layer.states.spec for layer in self._recurrent]

    def use_states(self, states: StatePool) -> None:
        """Read and write the states of recurrent layers there from now on."""
        self._states = StepStates(states)
        for number, layer in enumerate(self._recurrent):
            layer.states.use(self._states, number)

    def linear_sites(self) -> list[LinearSite]:
        """The matrices that adapters may change, in the same order for all models of one shape."""
        return [site for layer in self._layers for site in layer.sites]

    def other_sites(self) -> list[SiteShape]:
        """Return the sites of other stages, whose layers are alike."""
        return [
            SiteShape(site.shape.in_size, tuple((_of_layer(index, name), rows) for name, rows in site.shape.parts))
            for index in range(self._config.num_layers)
            if index not in self._share.layers
            for site in self._layers[0].sites
        ]

    @property
    def collectives(self) -> Collectives | None:
        """Return the collectives of the stage's ranks; None for one rank."""
        return self._collectives

    @property
    def num_layers(self) -> int:
        """Count the layers of the model over all stages."""
        return self._config.num_layers

    @property
    def balance(self) -> ExpertBalance | None:
        """Return the balance that moves experts between the stage's ranks."""
        return self._balance

    def mixtures(self) -> dict[int, Mixture]:
        """The mixtures of experts by layer of the model, of this stage."""
        found = zip(self._share.layers, (layer.mixture for layer in self._layers), strict=True)
        return {index: mixture for index, mixture in found if mixture is not None}

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend, images: ImageRows | None = None
    ) -> torch.Tensor:
        """[T, hidden] after the stage: of the last one after the final norm. `inputs`, `positions`, `images`: as in `begin`."""
        return self.layers(self.begin(inputs, positions, images), attend, images)

    def begin(self, inputs: torch.Tensor, positions: torch.Tensor, images: ImageRows | None = None) -> Begun:
        """Hidden states [T, hidden], and what `LayerTurns.at` gives for `positions` [T] i64, or [3, T] (M-RoPE).

        `inputs`: token ids [T] i64, or on a later stage the [T, hidden] that the one before has computed. `images`: what stands in for
        embeddings, on the first stage.
        """
        if self._states is not None:
            self._states.begin()
        hidden = inputs if self._embedding is None else self.embedded(inputs)
        if images is not None:
            assert self.vision is not None, "the first stage of a model that sees has images"
            hidden = images.embedded(hidden)
        return hidden, *self._turns.at(positions)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden] for token ids [T] i64, of the first stage."""
        assert self._embedding is not None
        rows = self._embedding(ids)
        return rows if self._embedding_scale == 1.0 else rows.mul_(self._embedding_scale)

    def watch(self, layers: tuple[int, ...]) -> None:
        """Keep what the `layers` of every step begin from, for a drafter: so no step is recorded."""
        self._watched = layers

    @property
    def is_watched(self) -> bool:
        return bool(self._watched)

    def seen_inside(self) -> list[torch.Tensor]:
        """[T, hidden] of each layer that is watched, of the last step."""
        return [self._seen_inside[layer] for layer in self._watched]

    @property
    def states(self) -> StepStates | None:
        """Of its recurrent layers, if it has some."""
        return self._states

    def pass_again(self, rows: torch.Tensor, counts: Sequence[int], slots: torch.Tensor) -> None:
        """Pass `rows` [n] int64 of the last step with drafts through the recurrences alone, whose states are those before them.

        `counts`: rows of each request, one behind the other; `slots` [requests] int32: of their states.
        """
        assert self._states is not None, "use_states() comes first"
        self._states.begin_again(counts, slots)
        for layer in self._recurrent:
            layer.pass_again(rows)

    def keep_states(self) -> Callable[[], object]:
        """Between `begin` and `layers`: what is returned undoes what `layers` makes of recurrent states."""
        return (lambda: None) if self._states is None else self._states.keep()

    def layers(self, begun: Begun, attend: Attend, images: ImageRows | None = None) -> torch.Tensor:
        """The rest of `forward`; may change `begun` in place, and return a part of it. `images`: those of `begin`."""
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
        """Compute this rank's part of what all DP ranks compute together, in a step that only others have tokens in."""
        for layer in self._layers:
            layer.join()

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """[n, vocab] float32 for `hidden` [n, hidden], rows from `forward`; in `out` if given.

        None but on rank 0 of the last stage, where they may be valid until the next call only.
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
        """[n, labels] float32 for `hidden` [n, hidden], of a classifier's last stage."""
        assert self._labels is not None, "the model has no labels"
        return hidden.float() @ self._labels.T

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`, scaled and capped in place as the family does."""
        scale, cap = self._config.arithmetic.logit_scale, self._config.arithmetic.logit_cap
        if scale != 1.0:
            logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype).item()


def _of_layer(index: int, name: str) -> str:
    """`name`: of the same matrix in another layer."""
    return re.sub(r"^model\.layers\.\d+\.", f"model.layers.{index}.", name)


class NoHead:
    """Steps draw tokens that nothing reads: the frontend refuses to generate. `width`: tokens of the own vocabulary."""

    def __init__(self, width: int) -> None:
        self._width = width

    def in_float32(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(x), self._width, device=x.device) if out is None else out.zero_()


def label_matrix(part: ModelPart) -> torch.Tensor | None:
    """[labels, hidden] fp32 of a classifier; None: it is none."""
    count = len(part.config.head.labels)
    shape = [count, part.config.hidden_size]
    return part.checkpoint.take("score.weight", shape, dtype=torch.float32) if count else None
