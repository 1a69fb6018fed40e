"""A decoder layer: attention, a feed-forward part, and norms."""

from typing import NamedTuple, Protocol

import torch

from engine.layers.linear import GATES, LinearSite, sums_matrix
from engine.layers.norm import NoNorm, Norm, Normed, Scaled, add
from engine.layers.rope import Turn
from engine.model_files.head_config import family_of
from engine.model_files.recurrent_config import MambaConfig
from engine.models.attention import Attend, Attention
from engine.models.expert_mlp import ExpertMLP
from engine.models.expert_parallel import ExpertParallelMLP
from engine.models.mla import LatentAttention
from engine.models.part import ModelPart
from engine.models.recurrent import DeltaMixer, MambaMixer, ParallelMixers
from engine.parallel.row_exchange import RowExchange

Mixture = ExpertMLP | ExpertParallelMLP


class _Norms(NamedTuple):
    """Checkpoint names of norms, without "_layernorm"; empty: absent."""

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


RecurrentMixer = DeltaMixer | MambaMixer | ParallelMixers


class Layer:
    """Layer `index`; `place`: its index among the stage's layers with KV."""

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
        """Add `delta`, the previous layer's output, to x; return this layer's.

        The addition is fused with a norm.
        """
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
        return self._attention if isinstance(self._attention, RecurrentMixer) else None

    def join(self) -> None:
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
        return ParallelMixers(Attention(part, f"{prefix}self_attn.", place=place), mamba)
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
    """An MLP or a mixture of experts."""

    sites: list[LinearSite]

    def __call__(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Return [T, hidden] of norm(x + delta), equal on all ranks; adds `delta` to x in place."""


class DenseMLP:
    """down(act(gate(x)) * up(x)) with one gate-up matrix, or down(act(up(x)))."""

    def __init__(self, part: ModelPart, prefix: str) -> None:
        self._activation = part.config.arithmetic.activation
        self._gate_up, gate_up = part.gate_up(prefix, gates=self._activation == "silu")
        width, factor = part.mlp_cut(part.config.intermediate_size), part.config.arithmetic.down_factor
        name, bias = f"{prefix}{part.mlp_names.down}", part.mlp_names.bias
        self._down, down = part.rows(name, width, bias=bias, factor=factor)
        self.sites = [LinearSite(self._gate_up, gate_up), LinearSite(self._down, down)]
        if factor != 1.0:
            self.sites = []  # LoRA would have to apply the factors

    def __call__(self, norm: Normed, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        if self._activation == "silu":
            return self._down(self._gate_up.gated_of_norm(norm, x, delta))
        return self._down(GATES[self._activation](self._gate_up.of_norm(norm, x, delta)))


class SharedMLP:
    """An MLP that all DP ranks divide (DP attention), for all rows.

    It has no LoRA sites: only a row's own DP rank knows its adapter.
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
        return self._exchange.compute(norm.of_sum(x, delta), self._partial)

    def join(self) -> None:
        self._exchange.compute(self._no_rows, self._partial)

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        return self._down.partial(self._gate(self._gate_up(x)))
