"""Norms, rotary embedding and gates: elementwise.c for bf16 on CPU, Triton on GPU.

C trusts its arguments: shapes and types are asserted before each call.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.kernels import tape
from engine.kernels.build import fields, load_library

if TYPE_CHECKING:
    from engine.kernels.triton.elementwise import TritonElementwise

SOURCE = Path(__file__).with_name("csrc") / "elementwise.c"
ABI_VERSION = 5
LANES = 16  # widths are multiples of it


class _Norm(ctypes.Structure):
    _fields_ = fields(("x", "delta", "weight", "out"), ("rows", "width"), ("eps", "offset"))


class _Turn(ctypes.Structure):
    _fields_ = fields(
        ("x", "weight", "cosine", "sine"),
        ("x_stride", "turn_stride", "rows", "heads", "dim"),
        ("eps", "offset"),
    )


class _Gate(ctypes.Structure):
    _fields_ = fields(("x", "out"), ("rows", "width"))


class _SigmoidGate(ctypes.Structure):
    _fields_ = fields(("gates", "x", "out"), ("gates_stride", "rows", "width"))


class Elementwise:
    """Kernels of elementwise.c; a row has the same bits in any batch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        assert library.tandem_elementwise_abi() == ABI_VERSION
        self._rms_norm = library.tandem_rms_norm
        self._add = library.tandem_add
        self._norm_rope = library.tandem_norm_turn
        self._silu_mul = library.tandem_silu_mul
        self._sigmoid_mul = library.tandem_sigmoid_mul
        self._sigmoid_mul.argtypes = [ctypes.POINTER(_SigmoidGate)]
        self._offset_norm, self._scale = library.tandem_offset_norm, library.tandem_scale
        self._gelu_mul = library.tandem_gelu_mul
        for function in (self._rms_norm, self._offset_norm, self._add, self._scale):
            function.argtypes = [ctypes.POINTER(_Norm)]
        self._norm_rope.argtypes = [ctypes.POINTER(_Turn)]
        for function in (self._silu_mul, self._gelu_mul):
            function.argtypes = [ctypes.POINTER(_Gate)]

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        delta: torch.Tensor | None = None,
        offset: float = 0.0,
    ) -> torch.Tensor:
        """Add `delta` to x [T, width] in place; return its RMS norm times weight + `offset`."""
        rows, width = x.shape
        assert weight.shape == (width,) and width % LANES == 0, (weight.shape, width)
        assert delta is None or delta.shape == x.shape, (delta, x.shape)
        out = tape.empty(x.shape, x.dtype)
        args = _Norm(
            x=_address(x),
            delta=None if delta is None else _address(delta),
            weight=_address(weight),
            out=out.data_ptr(),
            rows=rows,
            width=width,
            eps=eps,
            offset=offset,
        )
        tape.call(self._offset_norm if offset else self._rms_norm, args)
        return out

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add `delta` to x [T, width] in place."""
        rows, width = x.shape
        assert delta.shape == x.shape and width % LANES == 0, (x.shape, delta.shape)
        tape.call(self._add, _Norm(x=_address(x), delta=_address(delta), rows=rows, width=width))
        return x

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Multiply x [T, width] in place."""
        rows, width = x.shape
        assert width % LANES == 0, x.shape
        tape.call(self._scale, _Norm(x=_address(x), rows=rows, width=width, offset=factor))
        return x

    def norm_rope(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        *,
        weight: torch.Tensor | None,
        eps: float,
        offset: float = 0.0,
    ) -> None:
        """Normalize (if `weight` [H, D]) and rotate the heads of x [T, H, D] in place.

        x may be the first heads of a wider tensor; turn is from `Rope.at`.
        """
        (rows, heads, dim), (cosine, sine) = x.shape, turn
        assert x.dtype == torch.bfloat16 and x.stride()[1:] == (dim, 1) and dim % (2 * LANES) == 0, (x.dtype, x.shape)
        assert cosine.dtype == sine.dtype == x.dtype and cosine.shape == sine.shape == (rows, 1, dim), cosine.shape
        assert cosine.stride() == sine.stride() and cosine.stride(2) == 1, cosine.stride()
        assert weight is None or weight.shape == (heads, dim), (weight, x.shape)
        args = _Turn(
            x=x.data_ptr(),
            weight=None if weight is None else _address(weight),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            x_stride=x.stride(0),
            turn_stride=cosine.stride(0),
            rows=rows,
            heads=heads,
            dim=dim,
            eps=eps,
            offset=offset,
        )
        tape.call(self._norm_rope, args)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(x[:, :width]) * x[:, width:], [T, width]."""
        return self._gated(self._silu_mul, x)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Tanh gelu instead of silu."""
        return self._gated(self._gelu_mul, x)

    def _gated(self, kernel: tape.Kernel, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        assert x.shape[1] == 2 * width and width % LANES == 0, x.shape
        out = tape.empty((rows, width), x.dtype)
        args = _Gate(x=_address(x), out=out.data_ptr(), rows=rows, width=width)
        tape.call(kernel, args)
        return out

    def sigmoid_mul(self, gates: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return sigmoid(gates) * x [T, width]; `gates` may be a column slice."""
        (rows, width), out = x.shape, tape.empty(x.shape, x.dtype)
        assert gates.shape == x.shape and gates.dtype == x.dtype and gates.stride(1) == 1 and width % LANES == 0, (
            x.shape
        )
        args = _SigmoidGate(
            gates=gates.data_ptr(),
            x=_address(x),
            out=out.data_ptr(),
            gates_stride=gates.stride(0),
            rows=rows,
            width=width,
        )
        tape.call(self._sigmoid_mul, args)
        return out


@cache
def elementwise() -> Elementwise | None:
    library = load_library(SOURCE)
    return None if library is None else Elementwise(library)


@cache
def _on_gpu() -> "TritonElementwise | None":
    if find_spec("triton") is None:
        return None
    from engine.kernels.triton.elementwise import TritonElementwise

    return TritonElementwise()


def elementwise_for(like: torch.Tensor, *, multiple: int = LANES) -> "Elementwise | TritonElementwise | None":
    """Return norm and gate kernels for `like`, if any."""
    return _on_gpu() if like.device.type == "cuda" else elementwise_on_cpu(like, multiple=multiple)


def elementwise_on_cpu(like: torch.Tensor, *, multiple: int = LANES) -> Elementwise | None:
    """Return elementwise.c's kernels if `like` fits."""
    fits = like.device.type == "cpu" and like.dtype == torch.bfloat16 and like.shape[-1] % multiple == 0
    return elementwise() if fits else None


def _address(x: torch.Tensor) -> int:
    assert x.dtype == torch.bfloat16 and x.is_contiguous(), (x.dtype, x.shape, x.stride())
    return x.data_ptr()
