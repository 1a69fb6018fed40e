# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Recurrent layers for GPUs: short convolution, gated delta rule, Mamba2.

Operations of conv.c (prompts, too), delta.c and mamba.c. A program has a request's state in
registers and passes its rows in turn: bits depend on no other request. Slots are read on the
device, for graphs. After fla's fused_recurrent kernels and vLLM's causal_conv1d_update.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.recurrent import DeltaWeights, MambaWeights, RowTable, check_states

CHANNEL_TILE = 128
STATE_TILE = 8192  # fp32 of a state in registers; the delta rule takes whole heads for their norm


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    # max(x, 0) + log1p(e^-|x|) by a series of atanh: a GPU's logarithm has no digits near 1
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    square = s * s
    series = 1.0 / 15.0
    for n in tl.static_range(13, 0, -2):
        series = series * square + 1.0 / n
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _inputs(x_ptr, before_ptr, row, first, channel, tap, mask, x_stride, KEPT: tl.constexpr):
    """Inputs from `row` on, [channels, taps] fp32."""
    at = row + tap
    is_new = (at >= first)[None, :]
    new = tl.load(x_ptr + at.to(tl.int64)[None, :] * x_stride + channel[:, None], mask=mask & is_new, other=0.0)
    old = before_ptr + channel[:, None] * KEPT + (at - first + KEPT)[None, :]
    return new.to(tl.float32) + tl.load(old, mask=mask & (is_new == 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["before_stride"])
def conv_kernel(
    x_ptr,  # [T, x_stride]
    weight_ptr,  # [TAPS, CHANNELS] fp32, oldest first
    bias_ptr,  # [CHANNELS] fp32
    before_ptr,  # windows [CHANNELS, TAPS - 1]
    state_ptr,  # the same of all slots
    out_ptr,  # [T, CHANNELS]
    units_ptr,
    x_stride,
    before_stride,  # elements
    slot_stride,
    BIASED: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_TAPS: tl.constexpr,
):
    """Program (unit, tile of channels)."""
    unit = units_ptr + tl.program_id(0) * 5
    end = tl.load(unit + 1)
    first = tl.load(unit + 2)
    before_ptr += tl.load(unit + 3).to(tl.int64) * before_stride
    slot = tl.load(unit + 4).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tap = tl.arange(0, TILE_TAPS)
    inside = channel < CHANNELS
    mask = inside[:, None] & (tap < TAPS)[None, :]
    weight = tl.load(weight_ptr + tap[None, :] * CHANNELS + channel[:, None], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0) if BIASED else 0.0
    for row in range(tl.load(unit), end):
        x = _inputs(x_ptr, before_ptr, row - TAPS + 1, first, channel, tap, mask, x_stride, TAPS - 1)
        out = _silu(tl.sum(x * weight, 1) + bias)
        at = tl.cast(row, tl.int64) * CHANNELS + channel
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    mask = inside[:, None] & (tap < TAPS - 1)[None, :] & (slot > 0)
    window = _inputs(x_ptr, before_ptr, end - TAPS + 1, first, channel, tap, mask, x_stride, TAPS - 1)
    tl.debug_barrier()  # all threads have read the window before it changes
    to = state_ptr + slot * slot_stride + channel[:, None] * (TAPS - 1) + tap[None, :]
    tl.store(to, window.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unit(ptr, mask):
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def delta_kernel(
    mixed_ptr,  # [T, q | k | v] dense
    gates_ptr,  # [T, gates_stride]: beta | time of VALUE_HEADS
    z_ptr,  # [T, z_stride]
    decay_ptr,  # [VALUE_HEADS] fp32
    bias_ptr,
    norm_ptr,  # [VALUES] fp32
    state_ptr,  # [slots, VALUE_HEADS, KEYS, VALUES] fp32
    out_ptr,  # [T, VALUE_HEADS * VALUES]
    units_ptr,
    gates_stride,
    z_stride,
    slot_stride,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
):
    """Program (request, value head)."""
    unit = units_ptr + tl.program_id(0) * 5
    slot = tl.load(unit + 4).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    keys = tl.arange(0, TILE_KEYS)
    values = tl.arange(0, TILE_VALUES)
    mask = (keys < KEYS)[:, None] & (values < VALUES)[None, :]
    place = state_ptr + slot * slot_stride + (head * KEYS + keys)[:, None] * VALUES + values[None, :]
    state = tl.load(place, mask=mask, other=0.0)
    rate = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    norm = tl.load(norm_ptr + values, mask=values < VALUES, other=0.0)
    for index in range(tl.load(unit), tl.load(unit + 1)):
        row = tl.cast(index, tl.int64)
        mixed = mixed_ptr + row * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES)
        q = _unit(mixed + key_head * KEYS + keys, keys < KEYS) * scale
        k = _unit(mixed + (KEY_HEADS + key_head) * KEYS + keys, keys < KEYS)
        of_head = head * VALUES + values
        v = tl.load(mixed + 2 * KEY_HEADS * KEYS + of_head, mask=values < VALUES, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gates_ptr + row * gates_stride + head).to(tl.float32)))
        time = tl.load(gates_ptr + row * gates_stride + VALUE_HEADS + head).to(tl.float32)
        state *= tl.exp(rate * _softplus(time + bias))
        known = tl.sum(state * k[:, None], 0)
        state += k[:, None] * ((v - known) * beta)[None, :]
        out = tl.sum(state * q[:, None], 0)
        out = out / tl.sqrt(tl.sum(out * out, 0) / VALUES + eps) * norm
        z = tl.load(z_ptr + row * z_stride + of_head, mask=values < VALUES, other=0.0).to(tl.float32)
        to = out_ptr + row * (VALUE_HEADS * VALUES) + of_head
        tl.store(to, (out * _silu(z)).to(out_ptr.dtype.element_ty), mask=values < VALUES)
    tl.store(place, state, mask=mask & (slot > 0))


@triton.jit
def mamba_kernel(
    mixed_ptr,  # [T, x | B | C] dense
    time_ptr,  # [T, time_stride]: HEADS
    gate_ptr,  # [T, gate_stride]
    decay_ptr,  # [HEADS] fp32
    bias_ptr,
    skip_ptr,
    state_ptr,  # [slots, HEADS, KEYS, VALUES] fp32
    out_ptr,  # [T, HEADS * VALUES], gated if GATES
    units_ptr,
    time_stride,
    gate_stride,
    slot_stride,
    shortest,
    longest,
    GATES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
):
    """Program (request, head, tile of values)."""
    INNER: tl.constexpr = HEADS * VALUES
    unit = units_ptr + tl.program_id(0) * 5
    slot = tl.load(unit + 4).to(tl.int64)
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    keys = tl.arange(0, TILE_KEYS)
    values = tl.program_id(2) * TILE_VALUES + tl.arange(0, TILE_VALUES)
    inside = values < VALUES
    mask = (keys < KEYS)[:, None] & inside[None, :]
    place = state_ptr + slot * slot_stride + (head * KEYS + keys)[:, None] * VALUES + values[None, :]
    state = tl.load(place, mask=mask, other=0.0)
    rate = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    for index in range(tl.load(unit), tl.load(unit + 1)):
        row = tl.cast(index, tl.int64)
        mixed = mixed_ptr + row * (INNER + 2 * GROUPS * KEYS)
        of_head = head * VALUES + values
        x = tl.load(mixed + of_head, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(mixed + INNER + group * KEYS + keys, mask=keys < KEYS, other=0.0).to(tl.float32)
        q = tl.load(mixed + INNER + (GROUPS + group) * KEYS + keys, mask=keys < KEYS, other=0.0).to(tl.float32)
        time = _softplus(tl.load(time_ptr + row * time_stride + head).to(tl.float32) + bias)
        time = tl.minimum(tl.maximum(time, shortest), longest)
        state = state * tl.exp(time * rate) + k[:, None] * (x * time)[None, :]
        out = tl.sum(state * q[:, None], 0) + x * skip
        if GATES:
            gate = tl.load(gate_ptr + row * gate_stride + of_head, mask=inside, other=0.0).to(tl.float32)
            out *= _silu(gate)
        tl.store(out_ptr + row * INNER + of_head, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(place, state, mask=mask & (slot > 0))


@triton.jit
def gated_norm_kernel(
    x_ptr,  # [T, INNER] fp32
    gate_ptr,  # [T, gate_stride]
    norm_ptr,  # [INNER] fp32
    out_ptr,  # [T, INNER]
    units_ptr,
    gate_stride,
    eps,
    GATE_FIRST: tl.constexpr,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,  # of a group
    TILE: tl.constexpr,
):
    """Program (request, group): a norm behind `mamba_kernel`."""
    unit = units_ptr + tl.program_id(0) * 5
    at = tl.program_id(1) * SIZE + tl.arange(0, TILE)
    mask = tl.arange(0, TILE) < SIZE
    norm = tl.load(norm_ptr + at, mask=mask, other=0.0)
    for index in range(tl.load(unit), tl.load(unit + 1)):
        row = tl.cast(index, tl.int64)
        x = tl.load(x_ptr + row * INNER + at, mask=mask, other=0.0)
        gate = _silu(tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32))
        if GATE_FIRST:
            x *= gate
        x = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps) * norm
        if not GATE_FIRST:
            x *= gate
        tl.store(out_ptr + row * INNER + at, x.to(out_ptr.dtype.element_ty), mask=mask)


class TritonRecurrent:
    """Launches, with arguments of the C kernels. `out` has rows of prompts."""

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, table: RowTable) -> Tensor:
        (rows, channels), taps = x.shape, len(weight)
        assert x.stride(1) == 1 and weight.shape == (taps, channels) and weight.is_contiguous(), (x.stride(), weight)
        assert state.dtype == x.dtype and state.stride()[1:] == (taps - 1, 1), (state.dtype, state.stride())
        before = state if table.copied is None else state[table.copied]
        out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
        conv_kernel[(len(table.units), triton.cdiv(channels, CHANNEL_TILE))](
            x,
            weight,
            weight if bias is None else bias,
            before,
            state,
            out,
            table.units,
            x.stride(0),
            before.stride(0),
            state.stride(0),
            BIASED=bias is not None,
            **conv_constants(channels, taps),
            num_warps=4,
        )
        return out

    def delta(
        self,
        mixed: Tensor,
        gates: Tensor,
        z: Tensor,
        weights: DeltaWeights,
        state: Tensor,
        table: RowTable,
        out: Tensor,
    ) -> Tensor:
        if not table.decodes:
            return out
        value_heads, keys, values = state.shape[1:]
        key_heads = (mixed.shape[1] - value_heads * values) // (2 * keys)
        assert mixed.is_contiguous() and out.is_contiguous() and gates.stride(1) == z.stride(1) == 1, mixed.stride()
        check_states(state)
        delta_kernel[(table.decodes, value_heads)](
            mixed,
            gates,
            z,
            weights.decay,
            weights.bias,
            weights.norm,
            state,
            out,
            table.units,
            gates.stride(0),
            z.stride(0),
            state.stride(0),
            keys**-0.5,
            weights.eps,
            **delta_constants(key_heads, value_heads, keys, values),
            num_warps=4,
        )
        return out

    def mamba(
        self,
        mixed: Tensor,
        time: Tensor,
        gate: Tensor,
        weights: MambaWeights,
        state: Tensor,
        table: RowTable,
        out: Tensor,
    ) -> Tensor:
        if not table.decodes:
            return out
        heads, keys, values = state.shape[1:]
        assert mixed.is_contiguous() and out.is_contiguous() and time.stride(1) == gate.stride(1) == 1, mixed.stride()
        check_states(state)
        norm, constants = weights.norm, mamba_constants(heads, weights.groups, keys, values)
        to = out if norm is None else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        mamba_kernel[(table.decodes, heads, triton.cdiv(values, constants["TILE_VALUES"]))](
            mixed,
            time,
            gate,
            weights.decay,
            weights.bias,
            weights.skip,
            state,
            to,
            table.units,
            time.stride(0),
            gate.stride(0),
            state.stride(0),
            *weights.limits,
            GATES=norm is None,
            **constants,
            num_warps=4,
        )
        if norm is not None:
            size = heads * values // weights.groups
            gated_norm_kernel[(table.decodes, weights.groups)](
                to,
                gate,
                norm,
                out,
                table.units,
                gate.stride(0),
                weights.eps,
                GATE_FIRST=weights.gate_first,
                **norm_constants(heads * values, size),
                num_warps=norm_warps(size),
            )
        return out


def conv_constants(channels: int, taps: int) -> dict[str, int]:
    return {"CHANNELS": channels, "TAPS": taps, "TILE": CHANNEL_TILE, "TILE_TAPS": triton.next_power_of_2(taps)}


def delta_constants(key_heads: int, value_heads: int, keys: int, values: int) -> dict[str, int]:
    heads = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEYS": keys, "VALUES": values}
    return {**heads, "TILE_KEYS": triton.next_power_of_2(keys), "TILE_VALUES": triton.next_power_of_2(values)}


def mamba_constants(heads: int, groups: int, keys: int, values: int) -> dict[str, int]:
    tile_keys = triton.next_power_of_2(keys)
    tile = min(triton.next_power_of_2(values), max(1, STATE_TILE // tile_keys))
    sizes = {"HEADS": heads, "GROUPS": groups, "KEYS": keys, "VALUES": values}
    return {**sizes, "TILE_KEYS": tile_keys, "TILE_VALUES": tile}


def norm_constants(inner: int, size: int) -> dict[str, int]:
    return {"INNER": inner, "SIZE": size, "TILE": triton.next_power_of_2(size)}


def norm_warps(size: int) -> int:
    return 8 if size > 2048 else 4
