"""Short causal convolution of recurrent layers (conv.c), after checks of arguments."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import tape
from engine.kernels.build import fields, load_library
from engine.kernels.state_rows import StateRows

SOURCE = Path(__file__).with_suffix(".c")
ABI_VERSION = 2
MOST_TAPS = 8
DTYPES = (torch.bfloat16, torch.float32)


class _Args(ctypes.Structure):
    _fields_ = fields(
        ("step", "x", "weight", "bias", "state", "out"),
        ("rows", "channels", "taps", "x_stride", "slot_stride_bytes", "is_bf16"),
    )


class ConvKernel:
    """Kernel with equal bits for any cut of a request into steps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        assert library.tandem_conv_abi() == ABI_VERSION
        self._call = library.tandem_conv
        self._call.argtypes = [ctypes.POINTER(_Args)]

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
        args = _Args(
            step=rows.address,
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            state=state.data_ptr(),
            out=out.data_ptr(),
            rows=num_rows,
            channels=channels,
            taps=taps,
            x_stride=x.stride(0),
            slot_stride_bytes=state.stride(0) * state.itemsize,
            is_bf16=x.dtype == torch.bfloat16,
        )
        tape.call(self._call, args)
        return out


@cache
def conv_kernel() -> ConvKernel | None:
    library = load_library(SOURCE)
    return None if library is None else ConvKernel(library)
