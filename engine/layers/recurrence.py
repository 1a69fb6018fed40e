"""Recurrent states in a step: rows by request, states by layer."""

from collections.abc import Callable, Iterator, Sequence
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
    RequestRows,
    RowTable,
    StateRows,
    conv_kernel,
    delta_kernel,
    mamba_kernel,
    recorded_rows,
    recurrent_on_gpu,
    row_table,
)
from engine.kv.state_pool import StatePool
from engine.kv.step_batch import DeviceStep, upload

GRID = 64


# ---- Chunked recurrences S <- e^decay S + k u^T, o = S^T q in torch, for prompts.
#
# All chunks of a step are prepared at once; then one product a chunk passes the states on. Bits depend
# neither on cuts at multiples of GRID nor, on a CPU, on other requests. On a GPU cuBLAS may choose
# another kernel for another number of chunks, which rounds otherwise.

Rows = tuple[Tensor, ...]


class Decays(NamedTuple):
    """Decays between the rows of a chunk.

    `total` [n, GRID]: cumulative logs. `between` [n, GRID, GRID]: decay from column to row.
    """

    total: Tensor
    between: Tensor


def decays_of(decay: Tensor) -> Decays:
    """`decay` [n, GRID]: logarithms, at most 0.

    Sums are float64: after a strong decay fp32 loses digits of weak ones.
    """
    total = decay.double().cumsum(1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).float()
    return Decays(total.float(), between.tril().exp().tril())


class PreparedChunks(NamedTuple):
    """Chunks [n]: outputs are reads S + own, and S becomes carry S + added.

    reads [n, GRID, keys], own [n, GRID, values], added [n, keys, values]; carry [n, keys, keys],
    or [n, 1, 1]: factors.
    """

    reads: Tensor
    own: Tensor
    carry: Tensor
    added: Tensor

    def passed(self, at: slice, state: Tensor) -> Tensor:
        carry, added = self.carry[at], self.added[at]
        is_factor = carry.shape[1] < state.shape[1]
        return torch.addcmul(added, carry, state) if is_factor else torch.baddbmm(added, carry, state)


Prepare = Callable[[Rows], PreparedChunks]
One = Callable[[Rows, Tensor], tuple[Tensor, Tensor]]
CHUNKS_AT_ONCE = 32  # at once, of all heads


class PromptChunks(NamedTuple):
    """At most CHUNKS_AT_ONCE prompts, longest first, states in `slots` [n] i64.

    `parts`: padded rows [chunks * GRID] i64, chunk by chunk of all; requests that have each.
    """

    slots: Tensor
    parts: list[tuple[Tensor, list[int]]]


def prompt_chunks(prompts: Sequence[RequestRows], *, padding: int, device: torch.device) -> Iterator[PromptChunks]:
    longest = sorted(prompts, key=lambda span: span.first - span.end)
    for group in (longest[at : at + CHUNKS_AT_ONCE] for at in range(0, len(longest), CHUNKS_AT_ONCE)):
        parts, chunks, counts = list[tuple[Tensor, list[int]]](), list[tuple[int, int]](), list[int]()
        for index in range(0, group[0].end - group[0].first, GRID):
            now = [(span.first + index, span.end) for span in group if span.first + index < span.end]
            if len(chunks) + len(now) > CHUNKS_AT_ONCE:
                parts.append((_rows_of(chunks, padding, device), counts))
                chunks, counts = [], []
            chunks += now
            counts.append(len(now))
        parts.append((_rows_of(chunks, padding, device), counts))
        yield PromptChunks(upload([span.slot for span in group], device), parts)


def _rows_of(chunks: Sequence[tuple[int, int]], padding: int, device: torch.device) -> Tensor:
    first, end = torch.tensor(chunks).unsqueeze(2).unbind(1)
    rows = first + torch.arange(GRID)
    return upload(torch.where(rows < end, rows, padding).flatten(), device)


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
        self.gpu = recurrent_on_gpu(pool.buffer)
        self.table = RowTable(pool.buffer, 0)  # of a step on a GPU
        self.spans: Sequence[RequestRows] = ()
        self._chunks: list[PromptChunks] | None = []  # cut when a layer asks
        self.keeps = False
        self.products: dict[int, Tensor] = {}

    def begin(self) -> None:
        step = self._pool.step
        if isinstance(step, DeviceStep):
            assert step.state_rows is not None, "the recorder knows its step"
            self.spans, self._chunks, self.keeps = (), [], self._pool.num_shadows > 0
            self.table = recorded_rows(step.state_rows)
            return
        assert step is not None and step.state_slots is not None, "the pool knows its step"
        riders = {*(step.riders or ())} if step.extend else {*range(len(step.q_lens))}
        lens, slots, decodes = step.q_lens, step.state_slots, [i in riders for i in range(len(step.q_lens))]
        self.keeps = step.drafts
        if step.drafts:  # rows of one request must not race for its state
            first, *rest = step.first_rows()
            starts = [first, *rest[:-1]]
            lens = [sum(lens[a:b]) for a, b in zip(starts, rest, strict=True)]
            slots, decodes = [slots[i] for i in starts], [decodes[i] for i in starts]
        self._lay(lens, slots, decodes)

    def begin_again(self, counts: Sequence[int], slots: Sequence[int]) -> None:
        """Start a rerun with `counts` decode rows per request, states in `slots`."""
        self._lay(counts, slots, [True] * len(counts))

    def _lay(self, lens: Sequence[int], slots: Sequence[int], decodes: Sequence[bool]) -> None:
        if self.rows is not None:
            self.rows.begin(lens, slots)
        of_each = zip(accumulate(lens), lens, slots, decodes, strict=True)
        self.spans = [RequestRows(end - n, end, slot, one) for end, n, slot, one in of_each]
        self._chunks = None
        if self.gpu is not None:
            self.table = row_table(self.spans, self._pool.device)

    @property
    def chunks(self) -> list[PromptChunks]:
        if self._chunks is None:
            prompts = [span for span in self.spans if not span.decodes]
            self._chunks = [*prompt_chunks(prompts, padding=self.spans[-1].end, device=self._pool.device)]
        return self._chunks

    def keep(self) -> Callable[[], object]:
        return self._pool.keep([span.slot for span in self.spans])

    def of(self, layer: int) -> LayerStates:
        return LayerStates(self._pool.conv(layer), self._pool.recurrent(layer))


def recur(rule: Rows, state: Tensor, step: StepStates, *, one: One, prepare: Prepare) -> Tensor:
    """Outputs [T, heads, values] of a step, in torch; updates `state` [slots, heads, keys, values].

    `rule`: [T, heads, ...] fp32 each. `one` takes a decode token, `prepare` chunks of prompts.
    """
    heads, _, values = state.shape[1:]
    outputs = torch.empty(len(rule[0]) + 1, heads, values, device=state.device)
    for first, end, slot, decodes in step.spans:
        if decodes and step.gpu is None:
            outputs[first:end], state[slot] = _in_turn(tuple(x[first:end] for x in rule), state[slot], one)
    if step.chunks:  # a row of zeros is the padding
        rule = tuple(functional.pad(x, (*(0, 0) * (x.dim() - 1), 0, 1)) for x in rule)
    for prompts in step.chunks:
        _pass_prompts(rule, prompts, state, outputs, prepare)
    return outputs[:-1]


def _pass_prompts(rule: Rows, prompts: PromptChunks, state: Tensor, outputs: Tensor, prepare: Prepare) -> None:
    heads, now, ended = state.shape[1], state[prompts.slots].flatten(0, 1), list[Tensor]()
    for rows, counts in prompts.parts:
        prepared = prepare(tuple(x[rows].unflatten(0, (-1, GRID)).transpose(1, 2).flatten(0, 1) for x in rule))
        before, at = list[Tensor](), 0
        for size in (count * heads for count in counts):
            if size < len(now):
                ended.append(now[size:])
            before.append(now[:size])
            now = prepared.passed(slice(at, at + size), now[:size])
            at += size
        found = torch.baddbmm(prepared.own, prepared.reads, torch.cat(before))
        outputs[rows] = found.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
    state[prompts.slots] = torch.cat((now, *ended[::-1])).unflatten(0, (-1, heads))


def _in_turn(rows: Rows, state: Tensor, one: One) -> tuple[Tensor, Tensor]:
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
        if step.gpu is not None:
            return step.gpu.conv(x, self._weight, self._bias, state, step.table)
        if self._kernel is not None and step.rows is not None:
            return self._kernel(x, self._weight, self._bias, state, step.rows)
        taps, out = len(self._weight), torch.empty_like(x, memory_format=torch.contiguous_format)
        for first, end, slot, _ in step.spans:
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
        if step.gpu is not None:
            out = self._in_torch(mixed, gates, z, state, step) if step.chunks else mixed.new_empty(z.shape)
            return step.gpu.delta(mixed, gates, z, self._weights, state, step.table, out)
        if self._kernel is not None and step.rows is not None:
            return self._kernel(mixed, gates, z, self._weights, state, step.rows)
        return self._in_torch(mixed, gates, z, state, step)

    def _in_torch(self, mixed: Tensor, gates: Tensor, z: Tensor, state: Tensor, step: StepStates) -> Tensor:
        value_heads, keys, values = state.shape[1:]
        width = (mixed.shape[1] - value_heads * values) // 2
        q, k, v = torch.split(mixed.float(), [width, width, value_heads * values], dim=1)
        repeats = value_heads * keys // width
        q, k = (_unit(x.view(len(x), -1, keys)).repeat_interleave(repeats, 1) for x in (q, k))
        beta, time = gates.float().view(-1, 2, value_heads).unbind(1)
        decay = self._weights.decay * functional.softplus(time + self._weights.bias)
        rule = (q * keys**-0.5, k, v.view(-1, value_heads, values), beta.sigmoid(), decay)
        sums = recur(rule, state, step, one=_delta_step, prepare=_delta_chunks)
        normed = functional.rms_norm(sums, (values,), self._weights.norm, self._weights.eps)
        return (normed.flatten(1) * functional.silu(z.float())).to(mixed.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _delta_step(rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, beta, decay = (x[0] for x in rows)
    state = state * decay.exp()[:, None, None]
    known = (state * k.unsqueeze(-1)).sum(1)
    state = state + k.unsqueeze(-1) * ((v - known) * beta.unsqueeze(-1)).unsqueeze(1)
    return (state * q.unsqueeze(-1)).sum(1).unsqueeze(0), state


def _delta_chunks(rows: Rows) -> PreparedChunks:
    """A triangular system gives each token's addition to the state."""
    q, k, v, beta, decay = rows
    decays = decays_of(decay)
    keys, totals = k * beta.unsqueeze(-1), decays.total.exp().unsqueeze(-1)
    system = (keys @ k.transpose(1, 2) * decays.between).tril(-1)
    right = torch.cat((v * beta.unsqueeze(-1), keys * totals), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, read = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    seen, kept = q @ k.transpose(1, 2) * decays.between, (k * decays.between[:, -1, :, None]).transpose(1, 2)
    carry = totals[:, -1:] * torch.eye(k.shape[-1], device=k.device)
    return PreparedChunks(q * totals - seen @ read, seen @ own, carry - kept @ read, kept @ own)


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
        if step.gpu is not None:
            out = self._in_torch(mixed, time, gate, state, step) if step.chunks else mixed.new_empty(gate.shape)
            return step.gpu.mamba(mixed, time, gate, self._weights, state, step.table, out)
        if self._kernel is not None and step.rows is not None:
            return self._kernel(mixed, time, gate, self._weights, state, step.rows)
        return self._in_torch(mixed, time, gate, state, step)

    def _in_torch(self, mixed: Tensor, time: Tensor, gate: Tensor, state: Tensor, step: StepStates) -> Tensor:
        weights, (heads, keys, values) = self._weights, state.shape[1:]
        x, k, q = torch.split(mixed.float(), [heads * values, weights.groups * keys, weights.groups * keys], dim=1)
        q, k = (part.unflatten(1, (-1, keys)).repeat_interleave(heads // weights.groups, 1) for part in (q, k))
        times = functional.softplus(time.float() + weights.bias).clamp(*weights.limits)
        x = x.unflatten(1, (heads, values))
        rule = (q, k, x * times.unsqueeze(-1), times * weights.decay)
        sums = recur(rule, state, step, one=_mamba_step, prepare=_mamba_chunks)
        return self._gated((sums + x * weights.skip.unsqueeze(-1)).flatten(1), gate.float()).to(mixed.dtype)

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        weights, gate = self._weights, functional.silu(gate)
        if weights.norm is None:
            return x * gate
        before = x * gate if weights.gate_first else x
        grouped = before.unflatten(1, (weights.groups, -1))
        normed = functional.rms_norm(grouped, grouped.shape[-1:], None, weights.eps).flatten(1) * weights.norm
        return normed if weights.gate_first else normed * gate


def _mamba_step(rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, value, decay = (x[0] for x in rows)
    state = state * decay.exp()[:, None, None] + k.unsqueeze(-1) * value.unsqueeze(1)
    return (state * q.unsqueeze(-1)).sum(1).unsqueeze(0), state


def _mamba_chunks(rows: Rows) -> PreparedChunks:
    q, k, value, decay = rows
    decays = decays_of(decay)
    totals, seen = decays.total.exp().unsqueeze(-1), q @ k.transpose(1, 2) * decays.between
    kept = (k * decays.between[:, -1, :, None]).transpose(1, 2)
    return PreparedChunks(q * totals, seen @ value, totals[:, -1:], kept @ value)
