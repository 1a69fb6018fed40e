"""Norms, rotary embedding and gates: elementwise.c for bf16 on CPU, Triton on GPU.

C trusts its arguments: shapes and types are asserted before each call.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from engine.kernels import tape
from engine.kernels.build import CSource, fields

if TYPE_CHECKING:
    from engine.kernels.triton.elementwise import TritonElementwise

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


SOURCE = CSource(
    "elementwise",
    5,
    {
        **dict.fromkeys(("rms_norm", "offset_norm", "add", "scale"), _Norm),
        **dict.fromkeys(("silu_mul", "gelu_mul"), _Gate),
        **{"norm_turn": _Turn, "sigmoid_mul": _SigmoidGate},
    },
)


class Elementwise:
    """Kernels of elementwise.c; a row has the same bits in any batch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernels = library

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
        tape.call(self._kernels.tandem_offset_norm if offset else self._kernels.tandem_rms_norm, args)
        return out

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add `delta` to x [T, width] in place."""
        rows, width = x.shape
        assert delta.shape == x.shape and width % LANES == 0, (x.shape, delta.shape)
        tape.call(self._kernels.tandem_add, _Norm(x=_address(x), delta=_address(delta), rows=rows, width=width))
        return x

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Multiply x [T, width] in place."""
        rows, width = x.shape
        assert width % LANES == 0, x.shape
        tape.call(self._kernels.tandem_scale, _Norm(x=_address(x), rows=rows, width=width, offset=factor))
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
        tape.call(self._kernels.tandem_norm_turn, args)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(x[:, :width]) * x[:, width:], [T, width]."""
        return self._gated(self._kernels.tandem_silu_mul, x)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Tanh gelu instead of silu."""
        return self._gated(self._kernels.tandem_gelu_mul, x)

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
        tape.call(self._kernels.tandem_sigmoid_mul, args)
        return out


@cache
def elementwise() -> Elementwise | None:
    return SOURCE.open(Elementwise)


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
