"""Expert parallelism: ranks hold whole experts; tokens are dispatched, answers combined.

A token's own rank adds answers from the best expert down and rounds once, so bits equal those of
one rank. The shared expert is replicated. Any replica of an expert may serve a token.
"""

import torch
from torch import Tensor

from engine.layers.experts import RoutedTokens
from engine.layers.linear import Addend, LinearSite, Normed
from engine.model_files.experts_config import ExpertNames, ExpertsConfig
from engine.models.expert_mlp import AnyExperts, SharedExpert, load_experts, load_router, weighed
from engine.models.part import ModelPart
from engine.parallel.collectives import tree_sum
from engine.parallel.expert_placement import Placement
from engine.parallel.expert_rows import expert_rows
from engine.parallel.layout import Cut
from service.flags import ConfigError


class Placed:
    """Experts of this rank (`own`) and the placement on all."""

    def __init__(self, placement: Placement, own: AnyExperts, *, count: int, device: torch.device) -> None:
        self.placement, self.own = placement, own
        slots = [[slot for slot, expert in enumerate(placement) if expert == one] for one in range(count)]
        most = 1 + len(placement) - count  # so that tables of all placements have one shape
        self._copies = torch.tensor([len(found) for found in slots], device=device)
        self._slots = torch.tensor([[*found, *found[:1] * (most - len(found))] for found in slots], device=device)
        self._experts = torch.tensor(placement, device=device)
        self._count = count

    def take(self, other: "Placed") -> None:
        """Copy `other` into the same memory, which recorded graphs read."""
        self.placement = other.placement
        for mine, theirs in zip(self._tables, other._tables, strict=True):
            mine.copy_(theirs)
        self.own.take(other.own)

    @property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._copies, self._slots, self._experts

    def slots_of(self, chosen: Tensor) -> Tensor:
        """[T, k] slots of experts `chosen` [T, k], alternating between replicas."""
        if self._slots.shape[1] == 1:
            return self._slots[:, 0][chosen]
        token = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
        return self._slots[chosen, token % self._copies[chosen]]

    def loads(self, rows: Tensor) -> Tensor:
        return torch.zeros(self._count, dtype=torch.int64, device=rows.device).index_add_(0, self._experts, rows)


class ExpertParallelMLP:
    """An expert-parallel `FeedForward` without LoRA sites. `loads`: over tokens of all ranks."""

    def __init__(self, part: ModelPart, prefix: str, experts: ExpertsConfig, names: ExpertNames, index: int) -> None:
        self._router = load_router(part, prefix, experts, names, None)
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
            part.checkpoint.ignore(f"{prefix}{names.experts}.{expert}.")  # other ranks' experts
        self._no_rows = part.no_rows()
        self._width = segments * part.config.hidden_size
        self.counted = RoutedTokens(experts.count, device=part.checkpoint.device)
        self.loads = self.counted.total
        self.sites: list[LinearSite] = []
        moves = index < part.config.num_layers  # draft layers do not run in each step
        if part.balance is not None and moves:
            part.balance.add(self)

    def __call__(self, norm: Normed, x: Tensor, delta: Addend | None) -> Tensor:
        return self._of(norm.of_sum(x, delta))

    def count_rows(self, rows: Tensor | None) -> None:
        self.counted.rows = rows

    def join(self) -> None:
        self._of(self._no_rows)

    @torch.inference_mode()
    def moved(self, placement: Placement) -> Placed:
        """Read the experts of `placement` in any thread.

        Raises ConfigError if the checkpoint changed, or `take` cannot hold them.
        """
        with self._part.checkpoint.again() as checkpoint:
            found = self._load(self._part.over(checkpoint), placement)
        if not self.placed.own.takes(found.own):  # type: ignore[arg-type]
            raise ConfigError("--enable-eplb: experts of a layer are quantized in several forms; leave it out")
        if self.loads.is_cuda:
            torch.cuda.current_stream().synchronize()  # this thread's stream, because another stream uses the result
        return found

    @torch.inference_mode()
    def take(self, moved: Placed) -> None:
        if not self._rows.recordable:
            self.placed = moved
            return
        self.placed.take(moved)
        if self.loads.is_cuda:
            torch.cuda.current_stream().synchronize()  # `moved` may be freed after this, on another thread's stream

    def _of(self, own: Tensor) -> Tensor:
        placed = self.placed
        chosen, weights = self._router(own)
        slots = self.counted.real(placed.slots_of(chosen))
        # The layer of a drafter counts no rows, also in a graph.
        recorded = self.counted.rows is not None or (own.is_cuda and torch.cuda.is_current_stream_capturing())
        found = self._rows.answers(own, slots, self._compute, total=len(placed.placement), recorded=recorded)
        self.counted.add_real(placed.loads(found.rows))
        segments = [weighed(part, weights[found.mine]) for part in torch.split(found.answers, own.shape[1], dim=2)]
        if self._shared is not None:
            shared = self._shared(own[found.mine])
            segments = [routed + beside for routed, beside in zip(segments, shared, strict=True)]
        return self._rows.whole(tree_sum(segments).to(own.dtype), len(own))

    def _compute(self, x: Tensor, rows: Tensor) -> Tensor:
        if not len(x):
            return torch.empty((0, self._width), dtype=torch.float32, device=x.device)
        segments = self.placed.own(x, rows)
        return segments[0] if len(segments) == 1 else torch.cat(segments, dim=1)
