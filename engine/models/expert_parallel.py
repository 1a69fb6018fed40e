"""A mixture of experts over ranks that hold whole experts (expert parallel): tokens go to their experts and the answers come back.

A token's own rank weighs the answers and adds them, from the best expert on, and rounds once: the bits of one rank, on any number of
them. The expert of all tokens is whole on each rank, which computes it for its own tokens.
"""

import torch
from torch import Tensor

from engine.layers.linear import LinearSite
from engine.layers.norm import Normed
from engine.model_files.experts_config import ExpertNames, ExpertsConfig
from engine.models.expert_mlp import SharedExpert, load_experts, load_router, weighed
from engine.models.part import ModelPart
from engine.parallel.collectives import tree_sum
from engine.parallel.expert_rows import expert_rows
from engine.parallel.layout import Cut


class ExpertParallelMLP:
    """As `FeedForward`. It has no sites: adapters do not change experts."""

    def __init__(self, part: ModelPart, prefix: str, experts: ExpertsConfig, names: ExpertNames) -> None:
        self._router = load_router(part, prefix, experts, names)
        self._rows = expert_rows(part.collectives, part.exchange)
        self._slots, segments = experts.count, part.whole_segments
        whole = Cut.whole(experts.intermediate)
        own = self._rows.own_slots(self._slots)
        self._experts = load_experts(part, prefix, experts, names, own, cut=whole, segments=segments)
        self._shared = None
        if experts.shared_intermediate:
            cut = Cut.whole(experts.shared_intermediate)
            self._shared = SharedExpert(part, prefix, names, cut, segments=segments)
        for index in range(self._slots):
            if index not in own:
                part.checkpoint.ignore(f"{prefix}{names.experts}.{index}.")
        self._no_rows = part.no_rows()
        self.sites: list[LinearSite] = []

    def of_norm(self, norm: Normed, x: Tensor, delta: Tensor | None) -> Tensor:
        """The experts' answer to norm(x + delta), which x becomes before the norm."""
        return self._of(norm.of_sum(x, delta))

    def join(self) -> None:
        """Compute this rank's experts for the rows of the other DP ranks, without rows of its own."""
        self._of(self._no_rows)

    def _of(self, own: Tensor) -> Tensor:
        chosen, weights = self._router(own)
        answers = self._rows.answers(own, chosen, self._compute, total=self._slots).answers
        segments = [weighed(part, weights) for part in torch.split(answers, own.shape[1], dim=2)]
        if self._shared is not None:
            segments = [routed + shared for routed, shared in zip(segments, self._shared(own), strict=True)]
        return tree_sum(segments).to(own.dtype)

    def _compute(self, x: Tensor, rows: Tensor) -> Tensor:
        segments = self._experts(x, rows)
        return segments[0] if len(segments) == 1 else torch.cat(segments, dim=1)
