"""Recurrent states in a step: rows by request, states by layer."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.recurrent import (
    DTYPES,
    MAX_TAPS,
    DeltaWeights,
    MambaWeights,
    StateRows,
    conv_kernel,
    delta_kernel,
    mamba_kernel,
)
from engine.kv.state_pool import StatePool
from engine.kv.step_batch import upload

GRID = 64


class Decays(NamedTuple):
    """Decays between the rows of a chunk.

    `total` [heads, GRID]: cumulative logs. `between` [heads, GRID, GRID]: decay from column to row.

    Chunked recurrences S <- e^decay S + k u^T, o = S^T q in torch, for prefill. Bits do not depend
    on cuts at multiples of `GRID`.
    """

    total: Tensor
    between: Tensor


def decays_of(decay: Tensor) -> Decays:
    """`decay` [heads, GRID]: logarithms, at most 0.

    Sums are float64: after a strong decay fp32 loses digits of weak ones.
    """
    total = decay.double().cumsum(1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).float()
    return Decays(total.float(), between.tril().exp().tril())


def advance(q: Tensor, k: Tensor, added: Tensor, decays: Decays, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [heads, GRID, values] and the next state [heads, keys, values].

    q, k [heads, GRID, keys]; `added` [heads, GRID, values]: u of each token.
    """
    total, between = decays
    output = (q * total.exp().unsqueeze(-1)) @ state + (q @ k.transpose(1, 2) * between) @ added
    left = between[:, -1, :, None]
    return output, state * total[:, -1, None, None].exp() + (k * left).transpose(1, 2) @ added


Chunk = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor]]


def in_chunks(rows: tuple[Tensor, ...], state: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Return outputs [n, heads, values] and the next state.

    `rows`: [n, heads, ...] each; `chunk` gets `GRID`, heads first, zero-padded.
    """
    count = len(rows[0])
    parts = []
    for x in rows:
        padded = functional.pad(x.transpose(0, 1), (*(0, 0) * (x.dim() - 2), 0, -count % GRID))
        parts.append(torch.split(padded, GRID, dim=1))
    outputs = []
    for of_chunk in zip(*parts, strict=True):
        output, state = chunk(of_chunk, state)
        outputs.append(output)
    return torch.cat(outputs, 1)[:, :count].transpose(0, 1), state


class RequestRows(NamedTuple):
    """Rows `first`.. `end` of a request. `decodes`: one answer token, with drafts several."""

    first: int
    end: int
    decodes: bool


class LayerStates(NamedTuple):
    """One layer's [slots, channels, taps - 1] and [slots, *shape] fp32, scratch included."""

    conv: Tensor
    recurrent: Tensor


class StepStates:
    """Shared by all recurrent layers; call `begin` before each step.

    `keeps`: with drafts, layers keep `products`, their first product of all rows.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self.rows = StateRows(pool) if pool.device.type == "cpu" else None  # for C kernels
        self.spans: Sequence[RequestRows] = ()
        self.slots = torch.zeros(0, dtype=torch.int64, device=pool.device)
        self.keeps = False
        self.products: dict[int, Tensor] = {}

    def begin(self) -> None:
        step = self._pool.step
        assert step is not None and step.state_slots is not None, "the pool knows its step"
        riders = {*(step.riders or ())} if step.extend else {*range(len(step.q_lens))}
        lens, slots, decodes = step.q_lens, step.state_slots, [i in riders for i in range(len(step.q_lens))]
        self.keeps = step.drafts
        if step.drafts:  # rows of one request must not race for its state
            first, *rest = step.first_rows()
            starts = [first, *rest[:-1]]
            lens = [sum(lens[a:b]) for a, b in zip(starts, rest, strict=True)]
            slots, decodes = slots[upload(torch.tensor(starts), slots.device)], [decodes[i] for i in starts]
        self._lay(lens, slots, decodes)

    def begin_again(self, counts: Sequence[int], slots: Tensor) -> None:
        """Start a rerun with `counts` decode rows per request, states in `slots` [n] i32."""
        self._lay(counts, slots, [True] * len(counts))

    def _lay(self, lens: Sequence[int], slots: Tensor, decodes: Sequence[bool]) -> None:
        if self.rows is not None:
            self.rows.begin(lens, slots)
        ends = list(accumulate(lens))
        self.spans = [RequestRows(end - n, end, one) for end, n, one in zip(ends, lens, decodes, strict=True)]
        self.slots = slots.to(torch.int64)

    def keep(self) -> Callable[[], object]:
        return self._pool.keep(self.slots)

    def of(self, layer: int) -> LayerStates:
        return LayerStates(self._pool.conv(layer), self._pool.recurrent(layer))


def recur(rule: tuple[Tensor, ...], state: Tensor, step: StepStates, *, one: Chunk, chunk: Chunk) -> Tensor:
    """Outputs [T, heads, values] of a step, in torch; updates `state` [slots, heads, keys, values].

    `rule`: [T, heads, ...] fp32 each. `one` takes a decode token, `chunk` `GRID` prompt tokens.
    """
    heads, _, values = state.shape[1:]
    outputs = torch.empty(len(rule[0]), heads, values, device=state.device)
    for (first, end, decodes), slot in zip(step.spans, step.slots, strict=True):
        rows, before = tuple(x[first:end] for x in rule), state[slot]
        outputs[first:end], state[slot] = _in_turn(rows, before, one) if decodes else in_chunks(rows, before, chunk)
    return outputs


def _in_turn(rows: tuple[Tensor, ...], state: Tensor, one: Chunk) -> tuple[Tensor, Tensor]:
    outputs = []
    for i in range(len(rows[0])):
        output, state = one(tuple(x[i : i + 1] for x in rows), state)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state


# ---- Causal depthwise convolution of recurrent layers, then SiLU.


class ShortConv:
    """Causal convolution. `weight` [channels, taps], oldest first; `bias` [channels]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        on_cpu = weight.device.type == "cpu" and weight.dtype in DTYPES and weight.shape[1] <= MAX_TAPS
        self._kernel = conv_kernel() if on_cpu else None
        self._weight = weight.float().t().contiguous()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, state: Tensor, step: StepStates) -> Tensor:
        """x [T, channels] -> the same; updates state [slots, channels, taps - 1]."""
        if self._kernel is not None and step.rows is not None:
            return self._kernel(x, self._weight, self._bias, state, step.rows)
        taps, out = len(self._weight), torch.empty_like(x, memory_format=torch.contiguous_format)
        for (first, end, _), slot in zip(step.spans, step.slots, strict=True):
            inputs = torch.cat((state[slot].t(), x[first:end]))  # [taps - 1 + n, channels]
            windows = inputs.float().unfold(0, taps, 1)  # [n, channels, taps]
            sums = (windows * self._weight.t()).sum(-1)
            out[first:end] = functional.silu(sums if self._bias is None else sums + self._bias).to(x.dtype)
            state[slot] = inputs[len(inputs) - taps + 1 :].t()
        return out


class GatedDelta:
    """Gated DeltaNet without its products (Yang et al. 2024, arXiv:2412.06464).

    S <- exp(g) S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q       per value head, in fp32

    Value head h reads key head h // (value heads / key heads). delta.c goes by token; torch takes
    prompts in chunks.
    """

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
        sums = recur(rule, state, step, one=_delta_step, chunk=_delta_chunk)
        normed = functional.rms_norm(sums, (values,), self._weights.norm, self._weights.eps)
        return (normed.flatten(1) * functional.silu(z.float())).to(mixed.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _delta_step(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, beta, decay = (x[0] for x in rows)
    state = state * decay.exp()[:, None, None]
    known = (state * k.unsqueeze(-1)).sum(1)
    state = state + k.unsqueeze(-1) * ((v - known) * beta.unsqueeze(-1)).unsqueeze(1)
    return (state * q.unsqueeze(-1)).sum(1).unsqueeze(0), state


def _delta_chunk(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
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


class Mamba:
    """Mamba2 without its products (Dao and Gu 2024, arXiv:2405.21060).

    t = softplus(raw + bias);  S <- exp(t A) S + B (t x)^T;  o = S^T C + D x

    Per head, in fp32, with A < 0; head h reads B and C of group h // (heads / groups). mamba.c goes
    by token; torch takes prompts in chunks.
    """

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
        sums = recur(rule, state, step, one=_mamba_step, chunk=_mamba_chunk)
        return self._gated((sums + x * weights.skip.unsqueeze(-1)).flatten(1), gate.float()).to(mixed.dtype)

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        weights, gate = self._weights, functional.silu(gate)
        if weights.norm is None:
            return x * gate
        before = x * gate if weights.gate_first else x
        grouped = before.unflatten(1, (weights.groups, -1))
        normed = functional.rms_norm(grouped, grouped.shape[-1:], None, weights.eps).flatten(1) * weights.norm
        return normed if weights.gate_first else normed * gate


def _mamba_step(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, value, decay = (x[0] for x in rows)
    state = state * decay.exp()[:, None, None] + k.unsqueeze(-1) * value.unsqueeze(1)
    return (state * q.unsqueeze(-1)).sum(1).unsqueeze(0), state


def _mamba_chunk(rows: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, value, decay = rows
    return advance(q, k, value, decays_of(decay), state)
