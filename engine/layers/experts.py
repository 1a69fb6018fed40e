"""Products of experts: rows sorted by expert read each weight once."""

import threading
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.linear import PANEL, PackedMatrices
from engine.layers.linear import kernel_for, packable, silu_mul, sums_matrix
from engine.model_files.experts_config import ExpertsConfig
from engine.quant.integers import Weight, columns_of, dense_of

# ---- Expert choice and weights.


class RoutedTokens:
    """Counts by expert since the start, of the first `rows` [1] i64 of each step if given."""

    def __init__(self, count: int, *, device: torch.device) -> None:
        self.total = torch.zeros(count, dtype=torch.int64, device=device)
        self.rows: Tensor | None = None
        self._adding = threading.Lock()  # two streams may compute at once

    def real(self, slots: Tensor) -> Tensor:
        """Return `slots` [T, k], -1 in rows that are not counted."""
        if self.rows is None:
            return slots
        return torch.where(torch.arange(len(slots), device=slots.device).unsqueeze(1) < self.rows, slots, -1)

    def add(self, chosen: Tensor, rows: Tensor) -> None:
        if self.rows is not None:
            real = torch.arange(len(chosen), device=chosen.device).unsqueeze(1) < self.rows
            ones = real.expand_as(chosen).flatten().to(torch.int64)
            rows = torch.zeros_like(rows).scatter_add_(0, chosen.flatten().to(torch.int64), ones)
        self.add_real(rows)

    def add_real(self, rows: Tensor) -> None:
        with self._adding:
            self.total += rows


class ExpertRouter:
    """Chooses the experts of each token.

    `weight` [experts, hidden]; `bias` [experts] fp32, only for the choice. Scores are fp32,
    unrounded. Ties go to the lower expert.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, config: ExpertsConfig, *, logit_bias: Tensor | None = None
    ) -> None:
        self._matrix = sums_matrix(weight, logit_bias, segments=1)
        self._bias = bias
        self._config = config

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [T, per_token] i64, best first, and their weights fp32, for x [T, hidden]."""
        config, logits = self._config, self._matrix.partial(x)
        scores = logits.sigmoid() if config.sigmoid else logits.softmax(-1)
        chosen = self._choose(scores)
        weights = scores.gather(1, chosen)
        if config.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if config.sigmoid else 0.0))
        return chosen, weights * config.scaling

    def _choose(self, scores: Tensor) -> Tensor:
        config = self._config
        if self._bias is not None:
            scores = scores + self._bias
        if config.groups > 1:
            scores = _in_best_groups(scores, config)
        return _best(scores, config.per_token)


def _in_best_groups(scores: Tensor, config: ExpertsConfig) -> Tensor:
    """Scores of the chosen groups, -inf elsewhere.

    DeepSeek-V2 (arXiv:2405.04434) compares groups by the best expert, V3 (arXiv:2412.19437) by two.
    """
    grouped = scores.view(len(scores), config.groups, scores.shape[1] // config.groups)
    best = _best(grouped.topk(config.group_best, dim=-1).values.sum(-1), config.chosen_groups)
    kept = torch.zeros(best.shape[0], config.groups, dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).view_as(scores)


def _best(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


# ---- Grouped products without our C kernel.


def grouped_product(x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """x [T, in] sorted by expert, `weights` [experts, in, out], `rows` [experts] i64 -> [T, out].

    Rows after the last expert's are undefined.
    """
    return functional.grouped_mm(x, weights, offs=rows.cumsum(0).to(torch.int32))


class _Matrices(Protocol):
    def take(self, other: Any) -> None: ...

    def gated(self, x: Tensor, rows: Tensor) -> Tensor: ...

    def partial(self, x: Tensor, rows: Tensor) -> Tensor: ...


class _GatedMatrices:
    """`gate_up`: [2 * intermediate, hidden] each; `down`: [hidden, intermediate].

    `segments`: of the intermediate, summed apart. `gates`: gate and up lie one behind the other.
    """

    def __init__(self, gate_up: list[Weight], down: list[Weight], *, segments: int, gates: bool) -> None:
        self._width = down[0].shape[1] // segments
        self._gate_up = _pack(gate_up, gates=gates)
        starts = range(0, down[0].shape[1], self._width)
        columns = [slice(at, at + self._width) for at in starts]
        self._downs = [_pack([columns_of(matrix, own) for matrix in down], gates=gates) for own in columns]
        gate_up.clear()
        down.clear()

    def take(self, other: Self) -> None:
        """Take weights of `other`, in torch into the same memory."""
        for mine, theirs in zip([self._gate_up, *self._downs], [other._gate_up, *other._downs], strict=True):
            mine.take(theirs)

    def takes(self, other: Self) -> bool:
        """True: in any form."""
        return True

    def _down(self, inner: Tensor, rows: Tensor) -> list[Tensor]:
        parts = torch.split(inner, self._width, dim=1)
        return [down.partial(part.contiguous(), rows) for part, down in zip(parts, self._downs, strict=True)]


class Experts(_GatedMatrices):
    """The lists are emptied."""

    def __init__(self, gate_up: list[Weight], down: list[Weight], *, segments: int) -> None:
        super().__init__(gate_up, down, segments=segments, gates=True)

    def __call__(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        """[T, hidden] fp32 per segment; x [T, hidden] sorted by expert, `rows` [experts] i64."""
        return self._down(self._gate_up.gated(x, rows), rows)


class _TorchMatrices:
    def __init__(self, matrices: list[Tensor]) -> None:
        self._weights = torch.stack([matrix.t() for matrix in matrices])

    def take(self, other: "_TorchMatrices") -> None:
        self._weights.copy_(other._weights)

    def gated(self, x: Tensor, rows: Tensor) -> Tensor:
        return silu_mul(self._times(x, rows))

    def partial(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._times(x, rows).float()

    def _times(self, x: Tensor, rows: Tensor) -> Tensor:
        return grouped_product(x, self._weights, rows)


class _PlainlyGated:
    def __init__(self, packed: PackedMatrices) -> None:
        self._packed = packed
        self.partial = packed.partial

    def take(self, other: "_PlainlyGated") -> None:
        self._packed.take(other._packed)

    def gated(self, x: Tensor, rows: Tensor) -> Tensor:
        return silu_mul(self._packed.times(x, rows))


def _pack(matrices: list[Weight], *, gates: bool) -> _Matrices:
    first = matrices[0]
    kernel = kernel_for(first)
    if kernel is None:
        return _TorchMatrices([dense_of(matrix) for matrix in matrices])
    in_panels = gates and len(first) % PANEL == 0
    packed = PackedMatrices(kernel, [packable(matrix) for matrix in matrices], gates=in_panels)
    return packed if in_panels or not gates else _PlainlyGated(packed)


# ---- Experts with biases and clamped gates (gpt-oss).


class BiasedExperts(_GatedMatrices):
    """Experts with biases and a clamped gate (gpt-oss); rows of gate and up alternate.

    Biases are fp32; `down_bias` is None on ranks that must not add it.
    out = down((up + 1) * gate * sigmoid(alpha * gate)), gate <= `limit`, |up| <= `limit`.
    """

    def __init__(
        self,
        gate_up: list[Weight],
        gate_up_bias: Tensor,
        down: list[Weight],
        down_bias: Tensor | None,
        *,
        alpha: float,
        limit: float,
        segments: int,
    ) -> None:
        super().__init__(gate_up, down, segments=segments, gates=False)
        self._gate_up_bias, self._down_bias = gate_up_bias, down_bias
        self._alpha, self._limit = alpha, limit

    def take(self, other: Self) -> None:
        super().take(other)
        self._gate_up_bias.copy_(other._gate_up_bias)
        if self._down_bias is not None:
            assert other._down_bias is not None, "of one rank"
            self._down_bias.copy_(other._down_bias)

    def __call__(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        places = torch.arange(len(x), device=x.device)
        expert = torch.bucketize(places, rows.cumsum(0), right=True).clamp_(max=len(rows) - 1)  # no expert: any
        both = self._gate_up.partial(x, rows) + self._gate_up_bias[expert]
        gate, up = both[:, ::2].clamp(max=self._limit), both[:, 1::2].clamp(-self._limit, self._limit)
        inner = ((up + 1) * gate * torch.sigmoid(self._alpha * gate)).to(x.dtype)
        sums = self._down(inner, rows)
        if self._down_bias is not None:
            sums[0] = sums[0] + self._down_bias[expert]
        return sums
