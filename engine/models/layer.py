"""A decoder layer: attention, a feed-forward part, and norms."""

from typing import NamedTuple, Protocol

import torch

from engine.layers.linear import GATES, LinearSite, NoNorm, Normed, Scaled, add, sums_matrix
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


def layer_of(part: ModelPart, index: int, *, place: int, prefix: str = "") -> "Layer":
    """Load layer `index`; `place`: its index among the stage's layers with KV."""
    kind: type[Layer] = Layer
    if part.config.norms == "beside":
        kind = ParallelLayer
    elif _NORMS[part.config.norms].after_mlp or part.config.arithmetic.residual_scale != 1.0:
        kind = ShapedLayer
    return kind(part, index, place=place, prefix=prefix or f"model.layers.{index}.")


class Layer:
    """A layer with norms before attention and MLP."""

    def __init__(self, part: ModelPart, index: int, *, place: int, prefix: str) -> None:
        names = _NORMS[part.config.norms]

        def norm(name: str) -> Normed:
            return part.norm(f"{prefix}{name}_layernorm") if name else NoNorm()

        self._attention_norm, self._mlp_norm = norm(names.before_attention), norm(names.before_mlp)
        self._attention = _mixer(part, prefix, index, place=place)
        self._mlp = _feed_forward(part, prefix, index)
        self.sites = [*self._attention.sites, *self._mlp.sites]
        self.recurrent = (self._attention,) if isinstance(self._attention, RecurrentMixer) else ()
        self.mixtures = () if isinstance(self._mlp, DenseMLP | SharedMLP) else (self._mlp,)

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend) -> torch.Tensor:
        """Add `delta`, the previous layer's output, to x; return this layer's.

        The addition is fused with a norm.
        """
        return self._mlp(self._mlp_norm, x, self._attention(self._attention_norm, x, delta, turn, attend))

    def join(self) -> None:
        assert not isinstance(self._mlp, DenseMLP), "without DP attention no rank computes for others"
        self._mlp.join()


class ParallelLayer(Layer):
    """Attention and MLP of the same normed input (Phi)."""

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend) -> torch.Tensor:
        own = self._attention_norm.of_sum(x, delta)
        answer = self._attention(self._mlp_norm, own, None, turn, attend)
        return add(answer, self._mlp(self._mlp_norm, own, None))


class ShapedLayer(Layer):
    """A layer whose attention and MLP outputs are normed, or scaled."""

    def __init__(self, part: ModelPart, index: int, *, place: int, prefix: str) -> None:
        super().__init__(part, index, place=place, prefix=prefix)
        names, scale = _NORMS[part.config.norms], Scaled(part.config.arithmetic.residual_scale)
        self._after_attention, self._after_mlp = (
            part.norm(f"{prefix}{name}_layernorm") if name else scale
            for name in (names.after_attention, names.after_mlp)
        )

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend) -> torch.Tensor:
        delta = self._after_attention(self._attention(self._attention_norm, x, delta, turn, attend))
        return self._after_mlp(self._mlp(self._mlp_norm, x, delta))


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
