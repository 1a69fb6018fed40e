"""Mamba2 without its products (Dao and Gu 2024, arXiv:2405.21060).

t = softplus(raw + bias);  S <- exp(t A) S + B (t x)^T;  o = S^T C + D x

Per head, in fp32, with A < 0 and B, C of its group. mamba.c goes by token; torch takes prompts in
chunks (engine/layers/chunks.py).
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.conv import DTYPES
from engine.kernels.mamba import MambaWeights, mamba_kernel
from engine.layers.chunks import advance, decays_of
from engine.layers.recurrence import StepStates, recur


class Mamba:
    """Head h reads B and C of group h // (heads / groups)."""

    def __init__(self, weights: MambaWeights, *, keys: int, dtype: torch.dtype) -> None:
        on_cpu = weights.decay.device.type == "cpu" and dtype in DTYPES and keys % 2 == 0
        self._kernel = mamba_kernel() if on_cpu else None
        self._weights = weights

    def __call__(self, mixed: Tensor, time: Tensor, gate: Tensor, state: Tensor, step: StepStates) -> Tensor:
        """[T, heads * values]; arguments as in `MambaKernel`."""
        if self._kernel is not None and step.rows is not None:
            return self._kernel(mixed, time, gate, self._weights, state, step.rows)
        weights, (heads, keys, values) = self._weights, state.shape[1:]
        x, k, q = torch.split(mixed.float(), [heads * values, weights.groups * keys, weights.groups * keys], dim=1)
        q, k = (part.unflatten(1, (-1, keys)).repeat_interleave(heads // weights.groups, 1) for part in (q, k))
        times = functional.softplus(time.float() + weights.bias).clamp(*weights.limits)
        x = x.unflatten(1, (heads, values))
        rule = (q, k, x * times.unsqueeze(-1), times * weights.decay)
        sums = recur(rule, state, step, one=_one, chunk=_chunk)
        return self._gated((sums + x * weights.skip.unsqueeze(-1)).flatten(1), gate.float()).to(mixed.dtype)

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        weights, gate = self._weights, functional.silu(gate)
        if weights.norm is None:
            return x * gate
        before = x * gate if weights.gate_first else x
        grouped = before.unflatten(1, (weights.groups, -1))
        normed = functional.rms_norm(grouped, grouped.shape[-1:], None, weights.eps).flatten(1) * weights.norm
        return normed if weights.gate_first else normed * gate


def _one(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, value, decay = (x[0] for x in rows)
    state = state * decay.exp()[:, None, None] + k.unsqueeze(-1) * value.unsqueeze(1)
    return (state * q.unsqueeze(-1)).sum(1).unsqueeze(0), state


def _chunk(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, value, decay = rows
    return advance(q, k, value, decays_of(decay), state)
