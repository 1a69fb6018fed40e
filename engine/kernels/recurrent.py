"""Kernels of recurrent layers: short convolution, gated delta rule, Mamba2. C checks nothing.

Equal bits for any cut of a request into steps.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.kernels import tape
from engine.kernels.build import CSource, fields
from engine.kernels.rows import addresses
from engine.kv.state_pool import StatePool
from engine.kv.step_batch import upload

if TYPE_CHECKING:
    from engine.kernels.triton.recurrent import TritonRecurrent

# ---- Rows and state slots of a step's requests, for kernels of recurrent layers.


class _Rows(ctypes.Structure):
    _fields_ = fields(("starts", "slots"), ("batch",))


class StateRows:
    """A pool's one structure on CPU: recorded calls point here, and so read a new step."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._rows = _Rows()
        self.address = ctypes.addressof(self._rows)
        self._kept: tuple[torch.Tensor, ...] = ()  # keeps alive memory that _rows points to

    def begin(self, lens: Sequence[int], slots: Sequence[int]) -> None:
        assert len(slots) == len(lens), (slots, lens)
        assert min(slots) >= 0 and max(slots) <= self._pool.num_slots, slots  # C trusts them
        starts = torch.zeros(len(slots) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lens), 0, out=starts[1:])
        self._kept = (starts, torch.tensor(slots, dtype=torch.int32))
        self._rows.starts, self._rows.slots = (x.data_ptr() for x in self._kept)
        self._rows.batch = len(slots)


# ---- The same for kernels of GPUs.

UNIT_ROWS = 64  # of a prompt in a program of the convolution; more than any window


class RequestRows(NamedTuple):
    """Rows `first`.. `end` of a request. `decodes`: one answer token, with drafts several."""

    first: int
    end: int
    slot: int
    decodes: bool


class RowTable(NamedTuple):
    """Units [n, 5] i32: first row, end; request's first row; window before; slot to write or 0.

    Request `decodes` come first. Windows are slots, or copies of slots `copied`.
    """

    units: Tensor
    decodes: int
    copied: Tensor | None = None


def row_table(spans: Sequence[RequestRows], device: torch.device) -> RowTable:
    decodes = [span for span in spans if span.decodes]
    if len(decodes) == len(spans):
        units = [(first, end, first, slot, slot) for first, end, slot, _ in spans]
        return RowTable(upload(torch.tensor(units, dtype=torch.int32), device), len(units))
    units, prompts = [], [span for span in spans if not span.decodes]
    for place, (first, end, slot, _) in enumerate((*decodes, *prompts)):
        cuts = [end] if place < len(decodes) else [*range(first + UNIT_ROWS, end, UNIT_ROWS), end]
        starts = [first, *cuts[:-1]]
        units += [(a, b, first, place, slot if b == end else 0) for a, b in zip(starts, cuts, strict=True)]
    copied = upload([span.slot for span in (*decodes, *prompts)], device)  # units race for windows
    return RowTable(upload(torch.tensor(units, dtype=torch.int32), device), len(decodes), copied)


def recorded_rows(rows: Tensor) -> RowTable:
    first, end, slot = rows.to(torch.int32)
    return RowTable(torch.stack((first, end, first, slot, slot), 1), len(first))


@cache
def _on_gpu() -> "TritonRecurrent | None":
    if find_spec("triton") is None:
        return None
    from engine.kernels.triton.recurrent import TritonRecurrent

    return TritonRecurrent()


def check_states(state: Tensor) -> None:
    """Assert float32 [slots, heads, keys, values], dense in a slot."""
    keys, values = state.shape[2:]
    assert state.dtype == torch.float32 and state.stride()[1:] == (keys * values, values, 1), state.stride()


def recurrent_on_gpu(like: Tensor) -> "TritonRecurrent | None":
    return _on_gpu() if like.device.type == "cuda" else None


# ---- Short causal convolution of recurrent layers (conv.c), after checks of arguments.

MAX_TAPS = 8
DTYPES = (torch.bfloat16, torch.float32)


class _ConvArgs(ctypes.Structure):
    _fields_ = fields(
        ("step", "x", "weight", "bias", "state", "out"),
        ("rows", "channels", "taps", "x_stride", "slot_stride_bytes", "is_bf16"),
    )


CONV = CSource("conv", {"conv": _ConvArgs})


class ConvKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.tandem_conv

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows) -> Tensor:
        """Return silu(conv(x)) [T, channels] of x [T, channels], and update the state.

        Float32 weight [taps, channels]; state [slots, channels, taps - 1] in x's type.
        """
        (num_rows, channels), taps = x.shape, len(weight)
        assert x.dtype in DTYPES and state.dtype == x.dtype and x.stride(1) == 1, (x.dtype, state.dtype, x.stride())
        assert weight.shape == (taps, channels) and weight.dtype == torch.float32 and weight.is_contiguous()
        assert state.shape[1:] == (channels, taps - 1) and state.stride()[1:] == (taps - 1, 1), state.shape
        assert bias is None or (bias.shape == (channels,) and bias.dtype == torch.float32), bias
        out = tape.empty((num_rows, channels), x.dtype)
        args = _ConvArgs(
            rows.address,
            *addresses(x, weight, bias, state, out),
            rows=num_rows,
            channels=channels,
            taps=taps,
            x_stride=x.stride(0),
            slot_stride_bytes=state.stride(0) * state.itemsize,
            is_bf16=x.dtype == torch.bfloat16,
        )
        tape.call(self._call, args)
        return out


conv_kernel = CONV.once(ConvKernel)


# ---- Gated delta rule (delta.c), after checks of arguments.


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Float32 weights of a layer: `decay` = -exp(A_log), time `bias`, output `norm`."""

    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float


class _DeltaArgs(ctypes.Structure):
    _fields_ = fields(
        ("step", "mixed", "gates", "z", "decay", "bias", "norm", "state", "sums", "out"),
        (
            "gates_stride",
            "z_stride",
            "slot_stride_bytes",
            "key_heads",
            "value_heads",
            "keys",
            "values",
            "is_bf16",
        ),
        ("eps",),
    )


DELTA = CSource("delta", {"delta": _DeltaArgs})


class DeltaKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.tandem_delta

    def __call__(
        self, mixed: Tensor, gates: Tensor, z: Tensor, weights: DeltaWeights, state: Tensor, rows: StateRows
    ) -> Tensor:
        """Return norm(o) * silu(z) [T, value heads * values], and update the state.

        mixed [T, q | k | v] dense; gates [T, 2 * value heads], beta first; float32 state [slots,
        value heads, keys, values], keys even.
        """
        value_heads, keys, values = state.shape[1:]
        num_rows, width = mixed.shape
        key_heads, rest = divmod(width - value_heads * values, 2 * keys)
        assert rest == 0 and value_heads % key_heads == 0 and keys % 2 == 0, (mixed.shape, state.shape)
        assert mixed.dtype == gates.dtype == z.dtype and mixed.dtype in DTYPES and mixed.is_contiguous(), mixed.dtype
        assert gates.shape == (num_rows, 2 * value_heads) and z.shape == (num_rows, value_heads * values), z.shape
        assert gates.stride(1) == z.stride(1) == 1, (gates.stride(), z.stride())
        check_states(state)
        for vector, size in ((weights.decay, value_heads), (weights.bias, value_heads), (weights.norm, values)):
            assert vector.shape == (size,) and vector.dtype == torch.float32 and vector.is_contiguous(), vector.shape
        sums = tape.empty((num_rows, value_heads * values), torch.float32)
        out = tape.empty((num_rows, value_heads * values), mixed.dtype)
        args = _DeltaArgs(
            rows.address,
            *addresses(mixed, gates, z, weights.decay, weights.bias, weights.norm, state, sums, out),
            gates_stride=gates.stride(0),
            z_stride=z.stride(0),
            slot_stride_bytes=state.stride(0) * state.itemsize,
            key_heads=key_heads,
            value_heads=value_heads,
            keys=keys,
            values=values,
            is_bf16=mixed.dtype == torch.bfloat16,
            eps=weights.eps,
        )
        tape.call(self._call, args)
        return out


delta_kernel = DELTA.once(DeltaKernel)


# ---- Mamba2 state space (mamba.c), after checks of arguments.


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Float32 weights of a layer: `decay` = -exp(A_log), time `bias`, `skip` = D.

    `norm` is per group, before the gate or after it (`gate_first`).
    """

    decay: Tensor
    bias: Tensor
    skip: Tensor
    norm: Tensor | None
    gate_first: bool
    groups: int
    eps: float
    limits: tuple[float, float]


class _MambaArgs(ctypes.Structure):
    _fields_ = fields(
        ("step", "mixed", "time", "gate", "decay", "bias", "skip", "norm", "state", "sums", "out"),
        (
            "time_stride",
            "gate_stride",
            "slot_stride_bytes",
            "rows",
            "heads",
            "groups",
            "keys",
            "values",
            "gate_first",
            "is_bf16",
        ),
        ("eps", "shortest", "longest"),
    )


MAMBA = CSource("mamba", {"mamba": _MambaArgs})


class MambaKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.tandem_mamba

    def __call__(
        self, mixed: Tensor, time: Tensor, gate: Tensor, weights: MambaWeights, state: Tensor, rows: StateRows
    ) -> Tensor:
        """Return the gated output [T, heads * values], and update the state.

        mixed [T, x | B | C] dense; time [T, heads]; float32 state [slots, heads, keys, values],
        keys even.
        """
        heads, keys, values = state.shape[1:]
        num_rows, inner = len(mixed), heads * values
        assert mixed.shape[1] == inner + 2 * weights.groups * keys and heads % weights.groups == 0, mixed.shape
        assert mixed.dtype == time.dtype == gate.dtype and mixed.dtype in DTYPES and mixed.is_contiguous(), mixed.dtype
        assert time.shape == (num_rows, heads) and gate.shape == (num_rows, inner), (time.shape, gate.shape)
        assert time.stride(1) == gate.stride(1) == 1 and keys % 2 == 0, (time.stride(), gate.stride(), keys)
        check_states(state)
        for vector in (weights.decay, weights.bias, weights.skip):
            assert vector.shape == (heads,) and vector.dtype == torch.float32 and vector.is_contiguous(), vector.shape
        norm = weights.norm
        assert norm is None or (norm.shape == (inner,) and norm.dtype == torch.float32), norm
        sums = tape.empty((num_rows, inner), torch.float32)
        out = tape.empty((num_rows, inner), mixed.dtype)
        args = _MambaArgs(
            rows.address,
            *addresses(mixed, time, gate, weights.decay, weights.bias, weights.skip, norm, state, sums, out),
            time_stride=time.stride(0),
            gate_stride=gate.stride(0),
            slot_stride_bytes=state.stride(0) * state.itemsize,
            rows=num_rows,
            heads=heads,
            groups=weights.groups,
            keys=keys,
            values=values,
            gate_first=weights.gate_first,
            is_bf16=mixed.dtype == torch.bfloat16,
            eps=weights.eps,
            shortest=weights.limits[0],
            longest=weights.limits[1],
        )
        tape.call(self._call, args)
        return out


mamba_kernel = MAMBA.once(MambaKernel)
