"""Gated DeltaNet between its two products: gates, the delta rule over a state, norm and gate of the output.

Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464). Of a value head, in fp32:

    S <- exp(g) S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q

delta.c goes token by token. Torch, on other devices, multiplies prompts 64 tokens at a time: there a prompt has the same bits
wherever it is cut at a multiple of 64 (`GRID`).
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.conv import DTYPES
from engine.kernels.delta import DeltaWeights, delta_kernel
from engine.layers.recurrence import StepStates

GRID = 64  # tokens that torch multiplies at once


class GatedDelta:
    """Value head h reads key head h // (value heads / key heads)."""

    def __init__(self, weights: DeltaWeights, *, keys: int, dtype: torch.dtype) -> None:
        on_cpu = weights.norm.device.type == "cpu" and dtype in DTYPES and keys % 2 == 0
        self._kernel = delta_kernel() if on_cpu else None
        self._weights = weights

    def __call__(self, mixed: Tensor, gates: Tensor, z: Tensor, state: Tensor, step: StepStates) -> Tensor:
        """[T, value heads * values]. Arguments as of `DeltaKernel`, on any device."""
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
        sums = torch.empty(len(mixed), value_heads, values, device=mixed.device)
        for (first, end, decodes), slot in zip(step.spans, step.slots, strict=True):
            form, (q, k, v, beta, decay) = _one if decodes else _chunks, (x[first:end] for x in rule)
            sums[first:end], state[slot] = form(q, k, v, beta, decay, state[slot])
        normed = functional.rms_norm(sums, (values,), self._weights.norm, self._weights.eps)
        return (normed.flatten(1) * functional.silu(z.float())).to(mixed.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _one(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The output [1, heads, values] of one token, and the state [heads, keys, values] behind it."""
    state = state * decay[0].exp()[:, None, None]
    known = (state * k[0].unsqueeze(-1)).sum(1)
    state = state + k[0].unsqueeze(-1) * ((v[0] - known) * beta[0].unsqueeze(-1)).unsqueeze(1)
    return (state * q[0].unsqueeze(-1)).sum(1).unsqueeze(0), state


def _chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `_one`, of n tokens, `GRID` at a time; tokens of padding have k = v = beta = decay = 0 and change nothing."""
    count = len(q)
    padding = -count % GRID
    parts = [
        functional.pad(x.transpose(0, 1), (*(0, 0) * (x.dim() - 2), 0, padding)).split(GRID, 1)
        for x in (q, k, v, beta, decay)
    ]
    outputs = []
    for of_q, of_k, of_v, of_beta, of_decay in zip(*parts, strict=True):
        output, state = _chunk(of_q, of_k, of_v, of_beta, of_decay, state)
        outputs.append(output)
    return torch.cat(outputs, 1)[:, :count].transpose(0, 1), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Of `GRID` tokens, heads first: what each token adds to the state follows from a triangular system."""
    total = decay.cumsum(1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
    keys = k * beta.unsqueeze(-1)
    system = (keys @ k.transpose(1, 2) * between).tril(-1)
    right = torch.cat((v * beta.unsqueeze(-1), keys * total.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(
        system + torch.eye(GRID, device=q.device), right, upper=False, unitriangular=True
    )
    own, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    added = own - read @ state
    output = (q * total.exp().unsqueeze(-1)) @ state + (q @ k.transpose(1, 2) * between) @ added
    left = (total[:, -1:] - total).exp()
    return output, state * total[:, -1, None, None].exp() + (k * left.unsqueeze(-1)).transpose(1, 2) @ added
