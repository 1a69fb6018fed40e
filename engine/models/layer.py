"""A layer of the decoder: attention and a feed-forward part, each with the norms that its family has around it."""

from typing import NamedTuple, Protocol

import torch

from engine.layers.gates import GATES
from engine.layers.linear import LinearSite, sums_matrix
from engine.layers.norm import NoNorm, Norm, Normed, Scaled, add
from engine.layers.rope import Turn
from engine.model_files.head_config import family_of
from engine.model_files.recurrent_config import MambaConfig
from engine.models.attention import Attend, Attention
from engine.models.expert_mlp import ExpertMLP
from engine.models.expert_parallel import ExpertParallelMLP
from engine.models.hybrid import DeltaMixer
from engine.models.mamba import BesideMixers, MambaMixer
from engine.models.mla import LatentAttention
from engine.models.part import ModelPart
from engine.parallel.row_exchange import RowExchange

Mixture = ExpertMLP | ExpertParallelMLP


class _Norms(NamedTuple):
    """Names in the checkpoint of a layer's norms, without "_layernorm"; "": there is none."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


_NORMS = {
    "before": _Norms("input", "", "post_attention", ""),
    "before, Falcon": _Norms("input", "", "pre_ff", ""),
    "after": _Norms("", "post_attention", "", "post_feedforward"),
    "both": _Norms("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "beside": _Norms("input", "", "", ""),
    "around": _Norms("input", "post_self_attn", "post_attention", "post_mlp"),
}


RecurrentMixer = DeltaMixer | MambaMixer | BesideMixers


class Layer:
    """Layer `index` of the model. `place`: its number in the stage among the layers that have KV. `prefix`: of its tensors, if it is
    another than that of its number.
    """

    def __init__(self, part: ModelPart, index: int, *, place: int, prefix: str = "") -> None:
        names, scale = _NORMS[part.config.norms], part.config.arithmetic.residual_scale
        prefix = prefix or f"model.layers.{index}."

        def norm(name: str) -> Norm:
            return part.norm(f"{prefix}{name}_layernorm")

        def after(name: str) -> Norm | Scaled | None:
            if name:
                return norm(name)
            return None if scale == 1.0 else Scaled(scale)

        self._attention_norm: Normed = norm(names.before_attention) if names.before_attention else NoNorm()
        self._mlp_norm: Normed = norm(names.before_mlp) if names.before_mlp else NoNorm()
        self._after_attention = after(names.after_attention)
        self._after_mlp = after(names.after_mlp)
        self._is_beside = part.config.norms == "beside"
        self._attention = _mixer(part, prefix, index, place=place)
        self._mlp = _feed_forward(part, prefix, index)
        self.sites = [*self._attention.sites, *self._mlp.sites]
        self.mixture = None if isinstance(self._mlp, DenseMLP | SharedMLP) else self._mlp

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend) -> torch.Tensor:
        """Add `delta`, the output of the layer before, to x; return this layer's. So each sum is one pass with a norm."""
        if self._is_beside:
            own = self._attention_norm.of_sum(x, delta)
            answer = self._attention(self._mlp_norm, own, None, turn, attend)
            return add(answer, self._mlp(self._mlp_norm, own, None))
        delta = self._attention(self._attention_norm, x, delta, turn, attend)
        if self._after_attention is not None:
            delta = self._after_attention(delta)
        delta = self._mlp(self._mlp_norm, x, delta)
        return delta if self._after_mlp is None else self._after_mlp(delta)

    @property
    def recurrent(self) -> RecurrentMixer | None:
        """Its mixer, if this remembers requests beside K and V."""
        return self._attention if isinstance(self._attention, RecurrentMixer) else None

    def join(self) -> None:
        """Compute this rank's part for the rows of other DP ranks."""
        assert not isinstance(self._mlp, DenseMLP), "without DP attention no rank computes for others"
        self._mlp.join()


def _mixer(part: ModelPart, prefix: str, index: int, *, place: int) -> "Attention | LatentAttention | RecurrentMixer":
    recurrent = part.config.recurrent
    if recurrent is not None and index in recurrent.layers:
        if not isinstance(recurrent, MambaConfig):
            return DeltaMixer(part, f"{prefix}linear_attn.", recurrent)
        mamba = MambaMixer(part, f"{prefix}mamba.", recurrent)
        if not recurrent.beside_attention:
            return mamba
        return BesideMixers(Attention(part, f"{prefix}self_attn.", place=place), mamba)
    kind = Attention if part.config.latent is None else LatentAttention
    return kind(part, f"{prefix}self_attn.", place=place)


def _feed_forward(part: ModelPart, prefix: str, index: int) -> "DenseMLP | SharedMLP | Mixture":
    experts = part.config.experts
    if experts is not None and not part.config.is_dense(index):
        names = family_of(part.config.architecture).expert_names
        if part.place.ep_size > 1:
            return ExpertParallelMLP(part, prefix, experts, names, index)
        return ExpertMLP(part, prefix, experts, names)
    if part.exchange is not None:
        return SharedMLP(part, f"{prefix}{part.mlp_names.place}.", exchange=part.exchange)
    return DenseMLP(part, f"{prefix}{part.mlp_names.place}.")


class FeedForward(Protocol):
    """The part of a layer behind attention, on all ranks of its stage at once: of every token, or of those that a router of
    experts dispatches to a rank.
    """

    sites: list[LinearSite]

    def __call__(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """[T, hidden] of norm(x + delta), which x becomes before the norm; the same on all ranks."""


class DenseMLP:
    """down(act(gate(x)) * up(x)), gate and up in one matrix [2 * intermediate, hidden]; or down(act(up(x)))."""

    def __init__(self, part: ModelPart, prefix: str) -> None:
        self._activation = part.config.arithmetic.activation
        self._gate_up, gate_up = part.gate_up(prefix, gates=self._activation == "silu")
        width, factor = part.mlp_cut(part.config.intermediate_size), part.config.arithmetic.down_factor
        name, bias = f"{prefix}{part.mlp_names.down}", part.mlp_names.bias
        self._down, down = part.rows(name, width, bias=bias, factor=factor)
        self.sites = [LinearSite(self._gate_up, gate_up), LinearSite(self._down, down)]
        if factor != 1.0:
            self.sites = []  # an adapter would have to know the factors

    def __call__(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The MLP of norm(x + delta), which x becomes before the norm."""
        if self._activation == "silu":
            return self._down(self._gate_up.gated_of_norm(norm, x, delta))
        return self._down(GATES[self._activation](self._gate_up.of_norm(norm, x, delta)))


class SharedMLP:
    """The MLP that all DP ranks compute together (DP attention): each rank computes its part for all rows.

    It has no sites for adapters: a row's adapter is known to its own DP rank alone.
    """

    def __init__(self, part: ModelPart, prefix: str, *, exchange: RowExchange) -> None:
        self._gate_up, _ = part.gate_up(prefix)
        cut, segments = part.mlp_cut(part.config.intermediate_size), part.mlp_segments
        name, factors = f"{prefix}{part.mlp_names.down}", [part.config.arithmetic.down_factor]
        down = part.matrix([f"{name}.weight"], [part.config.hidden_size], cut, segments=segments, factors=factors)
        bias = part.vector(f"{name}.bias") if part.mlp_names.bias else None
        self._down = sums_matrix(down, bias if cut.taken.start == 0 else None, segments=segments)
        self._gate = GATES[part.config.arithmetic.activation]
        self._exchange = exchange
        self._no_rows = part.no_rows()
        self.sites: list[LinearSite] = []

    def __call__(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The MLP of norm(x + delta), which x becomes before the norm."""
        return self._exchange.compute(norm.of_sum(x, delta), self._partial)

    def join(self) -> None:
        """Compute this rank's part for the rows of the others, without rows of its own."""
        self._exchange.compute(self._no_rows, self._partial)

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        return self._down.partial(self._gate(self._gate_up(x)))
