"""Gated delta rule (delta.c), after checks of arguments."""

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
class DeltaWeights:
    """Float32 weights of a layer: `decay` = -exp(A_log), time `bias`, output `norm`."""

    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float


class _Args(ctypes.Structure):
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


class DeltaKernel:
    """Kernel with equal bits for any cut of a request into steps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        assert library.tandem_delta_abi() == ABI_VERSION
        self._call = library.tandem_delta
        self._call.argtypes = [ctypes.POINTER(_Args)]

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
        assert state.dtype == torch.float32 and state.stride()[1:] == (keys * values, values, 1), state.stride()
        for vector, size in ((weights.decay, value_heads), (weights.bias, value_heads), (weights.norm, values)):
            assert vector.shape == (size,) and vector.dtype == torch.float32 and vector.is_contiguous(), vector.shape
        sums = tape.empty((num_rows, value_heads * values), torch.float32)
        out = tape.empty((num_rows, value_heads * values), mixed.dtype)
        args = _Args(
            step=rows.address,
            mixed=mixed.data_ptr(),
            gates=gates.data_ptr(),
            z=z.data_ptr(),
            decay=weights.decay.data_ptr(),
            bias=weights.bias.data_ptr(),
            norm=weights.norm.data_ptr(),
            state=state.data_ptr(),
            sums=sums.data_ptr(),
            out=out.data_ptr(),
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


@cache
def delta_kernel() -> DeltaKernel | None:
    library = load_library(SOURCE)
    return None if library is None else DeltaKernel(library)
