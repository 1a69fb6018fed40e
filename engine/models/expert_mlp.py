"""A mixture-of-experts MLP: a router sends each token to its top-k experts.

x [T, hidden] -> router -> (token, k) rows sorted by expert -> experts -> original order
  -> weighted sum in order of k

Ranks have a part of every expert. Sums from the best expert down make bits independent of the
batch.
"""

import threading

import torch
from torch import Tensor

from engine.layers.linear import LinearSite, silu_mul, summed, sums_matrix
from engine.layers.norm import Normed
from engine.model_files.experts_config import ExpertNames, ExpertsConfig
from engine.models.expert_weights import load_experts, load_router
from engine.models.part import ModelPart, in_one
from engine.parallel.collectives import tree_sum
from engine.parallel.layout import Cut
from engine.quant.integers import columns_of


class ExpertMLP:
    """A `FeedForward` without LoRA sites. `loads` [experts] i64: tokens since the start."""

    def __init__(self, part: ModelPart, prefix: str, experts: ExpertsConfig, names: ExpertNames) -> None:
        self._router = load_router(part, prefix, experts, names)
        cut, segments = part.mlp_cut(experts.intermediate), part.mlp_segments
        self._experts = load_experts(part, prefix, experts, names, range(experts.count), cut=cut, segments=segments)
        self._shared = None
        if experts.shared_intermediate:
            cut = part.mlp_cut(experts.shared_intermediate)
            self._shared = SharedExpert(part, prefix, names, cut, segments=segments)
        self._count, self._per_token = experts.count, experts.per_token
        self._collectives, self._exchange = part.collectives, part.exchange
        self._no_rows = part.no_rows()
        self.loads = no_loads(part, experts)
        self._counting = threading.Lock()  # two streams may compute at once
        self.sites: list[LinearSite] = []

    def __call__(self, norm: Normed, x: Tensor, delta: Tensor | None) -> Tensor:
        own = norm.of_sum(x, delta)
        if self._exchange is not None:
            return self._exchange.compute(own, self._partial)
        partial = self._partial(own)
        if self._collectives is None:
            return partial.to(own.dtype)
        return summed(self._collectives, partial, dtype=own.dtype)

    def join(self) -> None:
        assert self._exchange is not None, "without DP attention no rank computes for others"
        self._exchange.compute(self._no_rows, self._partial)

    def _partial(self, x: Tensor) -> Tensor:
        chosen, weights = self._router(x)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        rows = torch.zeros(self._count, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
        with self._counting:
            self.loads += rows
        segments = [
            self._weighed(answers, order, weights)
            for answers in self._experts(x.index_select(0, order // self._per_token), rows)
        ]
        if self._shared is not None:
            segments = [routed + shared for routed, shared in zip(segments, self._shared(x), strict=True)]
        return tree_sum(segments)

    def _weighed(self, answers: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        ranked = torch.empty_like(answers).index_copy_(0, order, answers).view(*weights.shape, -1)
        return weighed(ranked, weights)


def no_loads(part: ModelPart, experts: ExpertsConfig) -> Tensor:
    return torch.zeros(experts.count, dtype=torch.int64, device=part.checkpoint.device)


def weighed(answers: Tensor, weights: Tensor) -> Tensor:
    total = answers[:, 0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total += answers[:, rank] * weights[:, rank : rank + 1]
    return total


class SharedExpert:
    """The expert that gets all tokens. `cut`: this rank's part of the intermediate."""

    def __init__(self, part: ModelPart, layer: str, names: ExpertNames, cut: Cut, *, segments: int) -> None:
        hidden, prefix = part.config.hidden_size, f"{layer}{names.shared}."
        self._gate = None
        if names.shared_gate:
            gate = part.checkpoint.take(f"{layer}{names.shared_gate}.weight", [1, hidden])
            self._gate = sums_matrix(gate, None, segments=1)
        both, rows = [f"{prefix}gate_proj", f"{prefix}up_proj"], [cut, cut]
        if names.shared_gate_up:
            both, rows = [f"{prefix}{names.shared_gate_up}"] * 2, in_one(rows)
        self._gate_up, _ = part.columns(both, rows)
        down = part.matrix([f"{prefix}{names.shared_down}.weight"], [hidden], cut, segments=segments)
        self._width = len(cut) // segments
        starts = range(0, len(cut), self._width)
        self._downs = [sums_matrix(columns_of(down, slice(at, at + self._width)), None, segments=1) for at in starts]

    def __call__(self, x: Tensor) -> list[Tensor]:
        parts = torch.split(silu_mul(self._gate_up(x)), self._width, dim=1)
        sums = [down.partial(part.contiguous()) for part, down in zip(parts, self._downs, strict=True)]
        if self._gate is None:
            return sums
        weight = self._gate.partial(x).sigmoid()
        return [partial * weight for partial in sums]
