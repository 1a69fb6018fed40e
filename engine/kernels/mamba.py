"""Mamba2 state space (mamba.c), after checks of arguments."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import tape
from engine.kernels.build import fields, load_library
from engine.kernels.conv import DTYPES
from engine.kernels.state_rows import StateRows

SOURCE = Path(__file__).with_suffix(".c")
ABI_VERSION = 2


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


class _Args(ctypes.Structure):
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


class MambaKernel:
    """Kernel with equal bits for any cut of a request into steps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        assert library.tandem_mamba_abi() == ABI_VERSION
        self._call = library.tandem_mamba
        self._call.argtypes = [ctypes.POINTER(_Args)]

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
        assert state.dtype == torch.float32 and state.stride()[1:] == (keys * values, values, 1), state.stride()
        for vector in (weights.decay, weights.bias, weights.skip):
            assert vector.shape == (heads,) and vector.dtype == torch.float32 and vector.is_contiguous(), vector.shape
        norm = weights.norm
        assert norm is None or (norm.shape == (inner,) and norm.dtype == torch.float32), norm
        sums = tape.empty((num_rows, inner), torch.float32)
        out = tape.empty((num_rows, inner), mixed.dtype)
        args = _Args(
            step=rows.address,
            mixed=mixed.data_ptr(),
            time=time.data_ptr(),
            gate=gate.data_ptr(),
            decay=weights.decay.data_ptr(),
            bias=weights.bias.data_ptr(),
            skip=weights.skip.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            state=state.data_ptr(),
            sums=sums.data_ptr(),
            out=out.data_ptr(),
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


@cache
def mamba_kernel() -> MambaKernel | None:
    library = load_library(SOURCE)
    return None if library is None else MambaKernel(library)
