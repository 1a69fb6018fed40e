"""Gated DeltaNet without its products (Yang et al. 2024, arXiv:2412.06464).

S <- exp(g) S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q       per value head, in fp32

delta.c goes by token; torch takes prompts in chunks (engine/layers/chunks.py).
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.conv import DTYPES
from engine.kernels.delta import DeltaWeights, delta_kernel
from engine.layers.chunks import GRID, advance, decays_of
from engine.layers.recurrence import StepStates, recur


class GatedDelta:
    """Value head h reads key head h // (value heads / key heads)."""

    def __init__(self, weights: DeltaWeights, *, keys: int, dtype: torch.dtype) -> None:
        on_cpu = weights.norm.device.type == "cpu" and dtype in DTYPES and keys % 2 == 0
        self._kernel = delta_kernel() if on_cpu else None
        self._weights = weights

    def __call__(self, mixed: Tensor, gates: Tensor, z: Tensor, state: Tensor, step: StepStates) -> Tensor:
        """[T, value heads * values]; arguments as in `DeltaKernel`."""
        if self._kernel is not None and step.rows is not None:
            return self._kernel(mixed, gates, z, self._weights, state, step.rows)
        value_heads, keys, values = state.shape[1:]
        width = (mixed.shape[1] - value_heads * values) // 2
        q, k, v = torch.split(mixed.float(), [width, width, value_heads * values], dim=1)
        repeats = value_heads * keys // width
        q, k = (_unit(x.view(len(x), -1, keys)).repeat_interleave(repeats, 1) for x in (q, k))
        beta, time = gates.float().view(-1, 2, value_heads).unbind(1)
        decay = self._weights.decay * functional.softplus(time + self._weights.bias)
        rule = (q * keys**-0.5, k, v.view(-1, value_heads, values), beta.sigmoid(), decay)
        sums = recur(rule, state, step, one=_one, chunk=_chunk)
        normed = functional.rms_norm(sums, (values,), self._weights.norm, self._weights.eps)
        return (normed.flatten(1) * functional.silu(z.float())).to(mixed.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _one(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, beta, decay = (x[0] for x in rows)
    state = state * decay.exp()[:, None, None]
    known = (state * k.unsqueeze(-1)).sum(1)
    state = state + k.unsqueeze(-1) * ((v - known) * beta.unsqueeze(-1)).unsqueeze(1)
    return (state * q.unsqueeze(-1)).sum(1).unsqueeze(0), state


def _chunk(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """A triangular system gives each token's addition to the state."""
    q, k, v, beta, decay = rows
    decays = decays_of(decay)
    keys = k * beta.unsqueeze(-1)
    system = (keys @ k.transpose(1, 2) * decays.between).tril(-1)
    right = torch.cat((v * beta.unsqueeze(-1), keys * decays.total.exp().unsqueeze(-1)), -1)
    diagonal = torch.eye(GRID, device=q.device)
    solved = torch.linalg.solve_triangular(system + diagonal, right, upper=False, unitriangular=True)
    own, read = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    return advance(q, k, own - read @ state, decays, state)
