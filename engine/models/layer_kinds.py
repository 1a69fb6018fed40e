"""Layers of a model by its configuration: recurrences, latent attention, experts, divided MLPs."""

import torch

from engine.layers.linear import GATES, Addend, LinearSite, Normed, sums_matrix
from engine.model_files.head_config import family_of
from engine.model_files.recurrent_config import MambaConfig
from engine.models.expert_mlp import ExpertMLP
from engine.models.expert_parallel import ExpertParallelMLP
from engine.models.layer import NORMS, Attention, DenseMLP, FeedForward, Layer, Mixer, ParallelLayer, ShapedLayer
from engine.models.mla import LatentAttention
from engine.models.part import ModelPart
from engine.models.recurrent import DeltaMixer, MambaMixer, ParallelMixers
from engine.parallel.row_exchange import RowExchange

Mixture = ExpertMLP | ExpertParallelMLP
RecurrentMixer = DeltaMixer | MambaMixer | ParallelMixers


def layer_of(part: ModelPart, index: int, *, place: int, prefix: str = "") -> Layer:
    """Load layer `index`; `place`: its index among the stage's layers with KV."""
    kind: type[Layer] = Layer
    if part.config.norms == "beside":
        kind = ParallelLayer
    elif NORMS[part.config.norms].after_mlp or part.config.arithmetic.residual_scale != 1.0:
        kind = ShapedLayer
    prefix = prefix or f"model.layers.{index}."
    return kind(
        part,
        prefix,
        attention=lambda: _mixer(part, prefix, index, place=place),
        mlp=lambda: _feed_forward(part, prefix, index),
    )


def recurrent_in(layer: Layer) -> tuple[RecurrentMixer, ...]:
    return (layer.attention,) if isinstance(layer.attention, RecurrentMixer) else ()


def mixtures_in(layer: Layer) -> tuple[Mixture, ...]:
    return (layer.mlp,) if isinstance(layer.mlp, Mixture) else ()


def _mixer(part: ModelPart, prefix: str, index: int, *, place: int) -> Mixer:
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


def _feed_forward(part: ModelPart, prefix: str, index: int) -> FeedForward:
    experts = part.config.experts
    if experts is not None and not part.config.is_dense(index):
        names = family_of(part.config.architecture).expert_names
        if part.place.ep_size > 1:
            return ExpertParallelMLP(part, prefix, experts, names, index)
        return ExpertMLP(part, prefix, experts, names)
    if part.exchange is not None:
        return SharedMLP(part, f"{prefix}{part.mlp_names.place}.", exchange=part.exchange)
    return DenseMLP(part, f"{prefix}{part.mlp_names.place}.")


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

    def __call__(self, norm: Normed, x: torch.Tensor, delta: Addend | None) -> torch.Tensor:
        return self._exchange.compute(norm.of_sum(x, delta), self._partial)

    def join(self) -> None:
        self._exchange.compute(self._no_rows, self._partial)

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        return self._down.partial(self._gate(self._gate_up(x)))
