"""A mixture-of-experts MLP: a router sends each token to its top-k experts.

x [T, hidden] -> router -> (token, k) rows sorted by expert -> experts -> original order
  -> weighted sum in order of k

Ranks have a part of every expert. Sums from the best expert down make bits independent of the
batch.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from engine.kernels.rows import takes_triton
from engine.layers.experts import BiasedExperts, ExpertRouter, Experts, RoutedTokens
from engine.layers.linear import Addend, LinearSite, NoNorm, Normed, summed, sums_matrix
from engine.model_files.experts_config import ClampedGate, ExpertNames, ExpertsConfig
from engine.models.part import ModelPart, in_one
from engine.models.quantized_tensors import keeps_packed
from engine.parallel.collectives import tree_sum
from engine.parallel.layout import Cut, Extent
from engine.quant.integers import BLOCK, Weight, columns_of, mxfp4_codes, mxfp4_values

if TYPE_CHECKING:
    from engine.layers.fused_experts import FusedExperts, FusedRouter

AnyExperts = Union[Experts, BiasedExperts, "FusedExperts"]


def load_router(
    part: ModelPart, prefix: str, experts: ExpertsConfig, names: ExpertNames, loads: RoutedTokens | None
) -> "ExpertRouter | FusedRouter":
    checkpoint = part.checkpoint
    weight = checkpoint.take(f"{prefix}{names.router}.weight", [experts.count, part.config.hidden_size])
    bias = logit_bias = None
    if experts.clamped is not None:
        logit_bias = checkpoint.take(f"{prefix}{names.router}.bias", [experts.count])
    elif experts.sigmoid:
        name = names.choice_bias or f"{names.router}.e_score_correction_bias"
        bias = checkpoint.take(f"{prefix}{name}", [experts.count], dtype=torch.float32)
    if takes_triton(checkpoint.device):
        from engine.layers.fused_experts import FusedRouter

        return FusedRouter(weight, bias, experts, logit_bias=logit_bias, loads=loads)
    return ExpertRouter(weight, bias, experts, logit_bias=logit_bias)


def load_experts(
    part: ModelPart,
    prefix: str,
    config: ExpertsConfig,
    names: ExpertNames,
    experts: Sequence[int],
    *,
    cut: Cut,
    segments: int,
) -> "AnyExperts":
    """Loads the experts of a layer and their router.

    one matrix each    most families
    two stacks         gate and up of all experts, and down: [experts, outputs, inputs], or in
                       Qwen3-VL [experts, inputs, outputs], by shape, else the first
    fused (gpt-oss)    inputs before outputs, or MXFP4 blocks, outputs first. Blocks stay packed
                       for our kernel; floats may be quantized (`--quantization`)
    """
    if config.clamped is not None:
        place = f"{prefix}{names.experts}."
        return _load_fused(part, place, config.clamped, experts, count=config.count, cut=cut, segments=segments)
    if names.stacks is not None and part.checkpoint.has(prefix + names.stacks[0]):
        first, last = (prefix + name for name in names.stacks)
        return _plain(part, *_load_stacks(part, (first, last), experts, cut=cut, segments=segments), segments=segments)
    hidden = part.config.hidden_size
    gate_up, down = [], []
    for index in experts:
        of_one = f"{prefix}{names.experts}.{index}."
        both = [f"{of_one}{name}.weight" for name in (names.gate, names.up)]
        gate_up.append(part.matrix(both, [cut, cut], hidden))
        down.append(part.matrix([f"{of_one}{names.down}.weight"], [hidden], cut, segments=segments))
    return _plain(part, gate_up, down, segments=segments)


def _plain(part: ModelPart, gate_up: list[Weight], down: list[Weight], *, segments: int) -> "Experts | FusedExperts":
    if takes_triton(part.checkpoint.device):
        from engine.layers.fused_experts import FusedExperts

        return FusedExperts(gate_up, down, segments=segments)
    return Experts(gate_up, down, segments=segments)


def _load_stacks(
    part: ModelPart, names: tuple[str, str], experts: Sequence[int], *, cut: Cut, segments: int
) -> tuple[list[Weight], list[Weight]]:
    hidden, (both, down) = part.config.hidden_size, names
    stored = part.checkpoint.shape_of(both)
    if stored[1:] != [2 * cut.total, hidden] and stored[1:] == [hidden, 2 * cut.total]:
        return (
            [_transposed(part, f"{both}[{index}]", in_one([cut, cut]), hidden, segments=1) for index in experts],
            [_transposed(part, f"{down}[{index}]", [hidden], cut, segments=segments) for index in experts],
        )
    return (
        [part.matrix([f"{both}[{index}]"] * 2, in_one([cut, cut]), hidden) for index in experts],
        [part.matrix([f"{down}[{index}]"], [hidden], cut, segments=segments) for index in experts],
    )


def _transposed(part: ModelPart, name: str, rows: Sequence[Extent], inputs: Extent, *, segments: int) -> Weight:
    read = part.matrices.read_inputs(name, inputs, segments)
    parts = [part.checkpoint.take(name, [read, own]).mT for own in rows]
    return part.matrices.rounded(torch.cat(parts), inputs)


def _load_fused(
    part: ModelPart, prefix: str, gate: ClampedGate, experts: Sequence[int], *, count: int, cut: Cut, segments: int
) -> "BiasedExperts | FusedExperts":
    hidden, checkpoint = Cut.whole(part.config.hidden_size), part.checkpoint
    own = Cut(count, range(min(experts), max(experts) + 1))
    order = [expert - own.taken.start for expert in experts]
    names = f"{prefix}gate_up_proj", f"{prefix}down_proj"
    of_names = _blocks if checkpoint.has(f"{names[0]}_blocks") else _floats
    gate_up = of_names(part, names[0], own, order, cut.times(2), hidden, segments=1)
    down = of_names(part, names[1], own, order, hidden, cut, segments=segments)
    gate_up_bias = checkpoint.take(f"{prefix}gate_up_proj_bias", [own, cut.times(2)], dtype=torch.float32)
    down_bias = checkpoint.take(f"{prefix}down_proj_bias", [own, hidden], dtype=torch.float32)
    biases = gate_up_bias[order], down_bias[order] if cut.taken.start == 0 else None
    if takes_triton(checkpoint.device):
        from engine.layers.fused_experts import Clamped, FusedExperts

        return FusedExperts(gate_up, down, segments=segments, clamped=Clamped(*biases, gate))
    return BiasedExperts(
        gate_up,
        biases[0],
        down,
        biases[1],
        alpha=gate.alpha,
        limit=gate.limit,
        segments=segments,
    )


def _floats(
    part: ModelPart, name: str, experts: Cut, order: Sequence[int], rows: Cut, columns: Cut, *, segments: int
) -> list[Weight]:
    stack = part.checkpoint.take(name, [experts, part.matrices.read_inputs(name, columns, segments), rows]).mT
    return [part.matrices.rounded(stack[place], columns) for place in order]


def _blocks(
    part: ModelPart, name: str, experts: Cut, order: Sequence[int], rows: Cut, columns: Cut, *, segments: int
) -> list[Weight]:
    """Blocks cut in the middle become floats."""
    checkpoint, first = part.checkpoint, columns.taken.start // BLOCK
    blocks = Cut(columns.total // BLOCK, range(first, -(-columns.taken.stop // BLOCK)))
    packed = checkpoint.take_bytes(f"{name}_blocks", [experts, rows, blocks, BLOCK // 2])
    scales = checkpoint.take_bytes(f"{name}_scales", [experts, rows, blocks])
    if keeps_packed(checkpoint.device, checkpoint.dtype) and len(columns) // segments % BLOCK == 0:
        codes = (mxfp4_codes(packed[place], scales[place], dtype=checkpoint.dtype) for place in order)
        return [matrix.to(checkpoint.device) for matrix in codes]
    begin = columns.taken.start - first * BLOCK
    values = mxfp4_values(packed, scales, dtype=checkpoint.dtype)[:, :, begin : begin + len(columns)]
    return [values[place].to(checkpoint.device) for place in order]


class ExpertMLP:
    """A `FeedForward` without LoRA sites. `loads` [experts] i64: tokens."""

    def __init__(self, part: ModelPart, prefix: str, experts: ExpertsConfig, names: ExpertNames) -> None:
        self.counted = RoutedTokens(experts.count, device=part.checkpoint.device)
        self.loads = self.counted.total
        router = load_router(part, prefix, experts, names, self.counted)
        cut, segments = part.mlp_cut(experts.intermediate), part.mlp_segments
        self._experts = load_experts(part, prefix, experts, names, range(experts.count), cut=cut, segments=segments)
        shared = None
        if experts.shared_intermediate:
            cut = part.mlp_cut(experts.shared_intermediate)
            shared = SharedExpert(part, prefix, names, cut, segments=segments)
        self._collectives, self._exchange = part.collectives, part.exchange
        whole = part.collectives.size == segments == 1 and part.exchange is None
        self._partial: Callable[[Tensor], Tensor]  # fp32, or what `summed` would round it to
        if isinstance(self._experts, Experts | BiasedExperts):
            self._partial = _Sorted(router, self._experts, shared, self.counted)
        else:
            dtype = torch.bfloat16 if whole and part.checkpoint.dtype == torch.bfloat16 else torch.float32
            self._partial = _Fused(router, self._experts, shared, dtype=dtype)
        self._no_rows = part.no_rows()
        self.sites: list[LinearSite] = []

    def count_rows(self, rows: Tensor | None) -> None:
        """Count none in recorded steps of DP attention: other ranks' padding is unknown."""
        self.counted.rows = rows if rows is None or self._exchange is None else torch.zeros_like(rows)

    def __call__(self, norm: Normed, x: Tensor, delta: Addend | None) -> Tensor:
        own = norm.of_sum(x, delta)
        if self._exchange is not None:
            return self._exchange.compute(own, self._partial)
        return summed(self._collectives, self._partial(own), dtype=own.dtype)

    def join(self) -> None:
        assert self._exchange is not None, "without DP attention no rank computes for others"
        self._exchange.compute(self._no_rows, self._partial)


class _Sorted:
    """Gathers rows by expert for grouped products: x [T, hidden] -> fp32 sums."""

    def __init__(
        self,
        router: "ExpertRouter | FusedRouter",
        experts: Experts | BiasedExperts,
        shared: "SharedExpert | None",
        counted: RoutedTokens,
    ) -> None:
        self._router, self._experts, self._shared, self._counted = router, experts, shared, counted

    def __call__(self, x: Tensor) -> Tensor:
        chosen, weights = self._router(x)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        rows = torch.zeros_like(self._counted.total).scatter_add_(0, flat, torch.ones_like(flat))
        self._counted.add(chosen, rows)
        segments = [
            self._weighed(answers, order, weights)
            for answers in self._experts(x.index_select(0, order // chosen.shape[1]), rows)
        ]
        if self._shared is not None:
            segments = [routed + shared for routed, shared in zip(segments, self._shared(x), strict=True)]
        return tree_sum(segments)

    def _weighed(self, answers: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        ranked = torch.empty_like(answers).index_copy_(0, order, answers).view(*weights.shape, -1)
        return weighed(ranked, weights)


class _Fused:
    """Sums in `dtype` by Triton's kernels; the router counts."""

    def __init__(
        self,
        router: "ExpertRouter | FusedRouter",
        experts: "FusedExperts",
        shared: "SharedExpert | None",
        *,
        dtype: torch.dtype,
    ) -> None:
        self._router, self._experts, self._shared, self._dtype = router, experts, shared, dtype

    def __call__(self, x: Tensor) -> Tensor:
        chosen, weights = self._router(x)
        shared = None if self._shared is None else self._shared.parts(x)
        return tree_sum(self._experts.total(x, chosen, weights, shared, dtype=self._dtype))


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
        sums, gate = self.parts(x)
        if gate is None:
            return sums
        weight = gate.sigmoid()
        return [partial * weight for partial in sums]

    def parts(self, x: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return sums [T, hidden] per segment, and [T, 1], whose sigmoid weighs them; all fp32."""
        parts = torch.split(self._gate_up.gated_of_norm(NoNorm(), x, None), self._width, dim=1)
        sums = [down.partial(part.contiguous()) for part, down in zip(parts, self._downs, strict=True)]
        return sums, None if self._gate is None else self._gate.partial(x)
