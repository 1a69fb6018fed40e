"""A mixture of experts over ranks that hold whole experts (expert parallel): tokens go to their experts and the answers come back.

A token's own rank weighs the answers and adds them, from the best expert on, and rounds once: the bits of one rank, on any number of
them. The expert of all tokens is whole on each rank, which computes it for its own tokens. Copies of an expert are equal, so it does
not matter to a token which one answers.
"""

import torch
from torch import Tensor

from engine.layers.biased_experts import BiasedExperts
from engine.layers.experts import Experts
from engine.layers.linear import LinearSite
from engine.layers.norm import Normed
from engine.model_files.experts_config import ExpertNames, ExpertsConfig
from engine.models.expert_mlp import SharedExpert, no_loads, weighed
from engine.models.expert_weights import load_experts, load_router
from engine.models.part import ModelPart
from engine.parallel.collectives import tree_sum
from engine.parallel.expert_placement import Placement
from engine.parallel.expert_rows import expert_rows
from engine.parallel.layout import Cut


class Placed:
    """Experts where they are. `placement`: of all ranks' slots; `own`: the products of this rank's."""

    def __init__(self, placement: Placement, own: Experts | BiasedExperts, *, count: int, device: torch.device) -> None:
        self.placement, self.own = placement, own
        slots = [[slot for slot, expert in enumerate(placement) if expert == one] for one in range(count)]
        most = 1 + len(placement) - count  # tables of any placement have one shape
        self._copies = torch.tensor([len(found) for found in slots], device=device)
        self._slots = torch.tensor([[*found, *found[:1] * (most - len(found))] for found in slots], device=device)
        self._experts = torch.tensor(placement, device=device)
        self._count = count

    def take(self, other: "Placed") -> None:
        """Become `other`, in the same memory: graphs that were recorded read it there."""
        self.placement = other.placement
        for mine, theirs in zip(self._tables, other._tables, strict=True):
            mine.copy_(theirs)
        self.own.take(other.own)

    @property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._copies, self._slots, self._experts

    def slots_of(self, chosen: Tensor) -> Tensor:
        """[T, k] slots of the experts `chosen` [T, k]: neighbouring tokens take other copies."""
        if self._slots.shape[1] == 1:
            return self._slots[:, 0][chosen]
        token = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
        return self._slots[chosen, token % self._copies[chosen]]

    def loads(self, rows: Tensor) -> Tensor:
        """[experts] i64 of `rows` [slots]."""
        return torch.zeros(self._count, dtype=torch.int64, device=rows.device).index_add_(0, self._experts, rows)


class ExpertParallelMLP:
    """As `FeedForward`. It has no sites: adapters do not change experts. `loads`: as of `ExpertMLP`, of the tokens of all ranks."""

    def __init__(self, part: ModelPart, prefix: str, experts: ExpertsConfig, names: ExpertNames, index: int) -> None:
        self._router = load_router(part, prefix, experts, names)
        self._rows = expert_rows(part.collectives, part.exchange)
        segments, whole = part.whole_segments, Cut.whole(experts.intermediate)
        placement = part.experts.placement(index, experts.count)
        self._own = self._rows.own_slots(len(placement))

        def load(part: ModelPart, placement: Placement) -> Placed:
            slots = [placement[slot] for slot in self._own]
            own = load_experts(part, prefix, experts, names, slots, cut=whole, segments=segments)
            return Placed(placement, own, count=experts.count, device=part.checkpoint.device)

        self._part, self._load = part, load
        self.placed = load(part, placement)
        self._shared = None
        if experts.shared_intermediate:
            cut = Cut.whole(experts.shared_intermediate)
            self._shared = SharedExpert(part, prefix, names, cut, segments=segments)
        for expert in range(experts.count):
            part.checkpoint.ignore(f"{prefix}{names.experts}.{expert}.")  # those of other ranks
        self._no_rows = part.no_rows()
        self.loads = no_loads(part, experts)
        self.sites: list[LinearSite] = []
        moves = index < part.config.num_layers  # a layer that drafts is no part of each step
        if part.balance is not None and moves:
            part.balance.add(self)

    def __call__(self, norm: Normed, x: Tensor, delta: Tensor | None) -> Tensor:
        """The experts' answer to norm(x + delta), which x becomes before the norm."""
        return self._of(norm.of_sum(x, delta))

    def join(self) -> None:
        """Compute this rank's experts for the rows of the other DP ranks, without rows of its own."""
        self._of(self._no_rows)

    @torch.inference_mode()
    def moved(self, placement: Placement) -> Placed:
        """Return the next `placed`: read beside the steps, in any thread. Raises ConfigError where the checkpoint is another now."""
        with self._part.checkpoint.again() as checkpoint:
            found = self._load(self._part.over(checkpoint), placement)
        if self.loads.is_cuda:
            torch.cuda.current_stream().synchronize()  # this thread's: another one's stream takes it
        return found

    @torch.inference_mode()
    def take(self, moved: Placed) -> None:
        """Have `moved` from the next step on."""
        if not self._rows.recordable:
            self.placed = moved
            return
        self.placed.take(moved)
        if self.loads.is_cuda:
            torch.cuda.current_stream().synchronize()  # then the memory of `moved` may go: it is of another thread's stream

    def _of(self, own: Tensor) -> Tensor:
        placed = self.placed
        chosen, weights = self._router(own)
        slots = placed.slots_of(chosen)
        answers, rows = self._rows.answers(own, slots, self._compute, total=len(placed.placement))
        self.loads += placed.loads(rows)
        segments = [weighed(part, weights) for part in torch.split(answers, own.shape[1], dim=2)]
        if self._shared is not None:
            segments = [routed + shared for routed, shared in zip(segments, self._shared(own), strict=True)]
        return tree_sum(segments).to(own.dtype)

    def _compute(self, x: Tensor, rows: Tensor) -> Tensor:
        segments = self.placed.own(x, rows)
        return segments[0] if len(segments) == 1 else torch.cat(segments, dim=1)
