"""Mixtures of experts by Triton's kernels (engine/kernels/triton/experts.py)."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.kernels.triton.experts import (
    PACKED_INPUTS,
    down,
    expert_tiles,
    is_long,
    route,
    route_constants,
    sort,
    up,
    weighed_sum,
)
from engine.kernels.triton.packed import Stack, packed
from engine.layers.experts import RoutedTokens
from engine.layers.linear import sums_matrix
from engine.model_files.experts_config import ClampedGate, ExpertsConfig
from engine.quant.integers import Weight, dense_of


class FusedRouter:
    """An `ExpertRouter` that adds to `loads`, if given."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        config: ExpertsConfig,
        *,
        logit_bias: Tensor | None = None,
        loads: RoutedTokens | None,
    ) -> None:
        self._matrix = sums_matrix(weight, None, segments=1)
        self._bias, self._logit_bias = bias, None if logit_bias is None else logit_bias.float()
        self._scale, self._loads = float(config.scaling), loads
        self._constants = route_constants(config)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loads = self._loads
        return route(
            self._matrix.partial(x),
            logit_bias=self._logit_bias,
            choice_bias=self._bias,
            loads=None if loads is None else loads.total,
            real=None if loads is None else loads.rows,
            scale=self._scale,
            constants=self._constants,
        )


class Clamped(NamedTuple):
    """Biases fp32 and gate of gpt-oss."""

    gate_up_bias: Tensor
    down_bias: Tensor | None
    gate: ClampedGate


class FusedExperts:
    """Lists as of `Experts`, or with `clamped` of `BiasedExperts`; they are emptied."""

    def __init__(
        self, gate_up: list[Weight], down: list[Weight], *, segments: int, clamped: Clamped | None = None
    ) -> None:
        self._segments = segments
        packs = segments == 1
        self._gate_up = _stacked(gate_up, alternates=clamped is None, packs=packs)
        self._down = _stacked(down, alternates=False, packs=packs)
        self._gate_up_bias, self._down_bias, self._clamp = None, None, None
        if clamped is not None:
            self._gate_up_bias, self._down_bias = clamped.gate_up_bias, clamped.down_bias
            self._clamp = float(clamped.gate.alpha), float(clamped.gate.limit)

    def take(self, other: Self) -> None:
        """Copy weights of `other`, as they are stored, into the same memory."""
        for mine, theirs in zip(self._tensors, other._tensors, strict=True):
            mine.copy_(theirs)

    def takes(self, other: Self) -> bool:
        """True if `other` is stored in the same form."""
        forms = [[(tensor.shape, tensor.dtype) for tensor in each._tensors] for each in (self, other)]
        return forms[0] == forms[1] and (self._gate_up.form, self._down.form) == (other._gate_up.form, other._down.form)

    @property
    def _tensors(self) -> list[Tensor]:
        stacks = [tensor for stack in (self._gate_up, self._down) for tensor in (stack.weight, stack.factors)]
        return [tensor for tensor in (*stacks, self._gate_up_bias, self._down_bias) if tensor is not None]

    def __call__(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        places = torch.arange(len(x), device=x.device)
        chosen = torch.bucketize(places, rows.cumsum(0), right=True, out_int32=True)
        return list(self._answers(x, chosen.unsqueeze(1), dtype=torch.float32))

    def total(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        shared: tuple[list[Tensor], Tensor | None] | None,
        *,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return [T, hidden] per segment, plus `SharedExpert.parts`, in `dtype`."""
        sums, gate = (None, None) if shared is None else shared
        rounds = is_long(chosen.numel(), self._down.shape[0])
        answers = self._answers(x, chosen, dtype=x.dtype if rounds else torch.float32)
        return [
            weighed_sum(part, weights, shared=None if sums is None else sums[i], gate=gate, dtype=dtype)
            for i, part in enumerate(answers)
        ]

    def _answers(self, x: Tensor, chosen: Tensor, *, dtype: torch.dtype) -> Tensor:
        pairs, experts = chosen.numel(), self._down.shape[0]
        stacks = self._gate_up, self._down
        of_up, of_down = (expert_tiles(pairs, experts, x.dtype, packed=stack.form is not None) for stack in stacks)
        blocks = sort(chosen, experts=experts, rows=of_up.rows)
        inner = up(x, self._gate_up, self._gate_up_bias, blocks, clamp=self._clamp, tiles=of_up)
        segments = self._segments
        return down(inner, self._down, self._down_bias, blocks, segments=segments, dtype=dtype, tiles=of_down)


def _stacked(matrices: list[Weight], *, alternates: bool, packs: bool) -> Stack:
    """`alternates`: interleave rows of gate and up. `packs`: if their form allows it."""
    found = packed(matrices, inputs=PACKED_INPUTS, alternates=alternates) if packs else None
    if found is not None:
        return found
    first = dense_of(matrices[0])
    stack = torch.empty((len(matrices), *first.shape), dtype=first.dtype, device=first.device)
    for into, matrix in zip(stack, matrices, strict=True):
        dense = dense_of(matrix)
        if alternates:
            into, dense = into.view(-1, 2, into.shape[1]), dense.unflatten(0, (2, -1)).transpose(0, 1)
        into.copy_(dense)
    matrices.clear()
    return Stack(stack, None, (len(stack), *first.shape), None)
