"""What lies between a decoder's products: calls elementwise.c for bf16 on a CPU, and chooses who computes it elsewhere.
No fallback here.

C believes what it is told: shapes and types are asserted before each call, which drops the GIL.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from engine.kernels.build import load_library

SOURCE = Path(__file__).with_suffix(".c")
ABI_VERSION = 1
LANES = 16  # widths are multiples of it

_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Rowwise(Protocol):
    """Rows do not depend on one another: a row gives the same bits in any batch. Shapes and types are asserted."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, width]: RMS norm of x [T, width], to which `delta` is added in place before; weight [width]."""

    def norm_turn(
        self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], *, weight: torch.Tensor | None, eps: float
    ) -> None:
        """x [T, H, D] in place: each head's RMS norm (`weight` [H, D], None: no norm), then its rotary turn.

        x may be the first heads of a wider tensor. turn: cosine and signed sine [T, 1, D], as `Rope.at` gives them.
        """

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, width]: silu(x[:, :width]) * x[:, width:] for x [T, 2 * width]."""


class Elementwise:
    """`Rowwise` by elementwise.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        assert library.tandem_elementwise_abi() == ABI_VERSION
        self._rms_norm = library.tandem_rms_norm
        self._rms_norm.argtypes = [*[_POINTER] * 4, _NUMBER, _NUMBER, _FLOAT, _NUMBER]
        self._norm_turn = library.tandem_norm_turn
        self._norm_turn.argtypes = [_POINTER, _NUMBER, *[_POINTER] * 3, *[_NUMBER] * 4, _FLOAT, _NUMBER]
        self._silu_mul = library.tandem_silu_mul
        self._silu_mul.argtypes = [_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER]
        for function in (self._rms_norm, self._norm_turn, self._silu_mul):
            function.restype = None

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        x_at, (rows, width) = _address(x), x.shape
        assert weight.shape == (width,) and width % LANES == 0, (weight.shape, width)
        assert delta is None or delta.shape == x.shape, (delta, x.shape)
        out = torch.empty_like(x)
        delta_at = None if delta is None else _address(delta)
        self._rms_norm(x_at, delta_at, _address(weight), out.data_ptr(), rows, width, eps, torch.get_num_threads())
        return out

    def norm_turn(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        *,
        weight: torch.Tensor | None,
        eps: float,
    ) -> None:
        (rows, heads, dim), (cosine, sine) = x.shape, turn
        assert x.dtype == torch.bfloat16 and x.stride()[1:] == (dim, 1) and dim % (2 * LANES) == 0, (x.dtype, x.shape)
        assert cosine.dtype == sine.dtype == x.dtype and cosine.shape == sine.shape == (rows, 1, dim), cosine.shape
        assert cosine.stride() == sine.stride() and cosine.stride(2) == 1, cosine.stride()
        assert weight is None or weight.shape == (heads, dim), (weight, x.shape)
        self._norm_turn(
            x.data_ptr(),
            x.stride(0),
            None if weight is None else _address(weight),
            cosine.data_ptr(),
            sine.data_ptr(),
            cosine.stride(0),
            rows,
            heads,
            dim,
            eps,
            torch.get_num_threads(),
        )

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        assert x.shape[1] == 2 * width and width % LANES == 0, x.shape
        out = x.new_empty((rows, width))
        self._silu_mul(_address(x), out.data_ptr(), rows, width, torch.get_num_threads())
        return out


@cache
def elementwise() -> Elementwise | None:
    """This process's kernels, or None where there is no compiler (logged)."""
    library = load_library(SOURCE)
    return None if library is None else Elementwise(library)


@cache
def _on_gpu() -> Rowwise | None:
    if find_spec("triton") is None:
        return None
    from engine.kernels.triton_elementwise import TritonElementwise

    return TritonElementwise()


def elementwise_for(like: torch.Tensor, *, multiple: int = LANES) -> Rowwise | None:
    """The kernels, if they take rows of the type, device and last size (on a CPU a multiple of `multiple`) of `like`."""
    if like.device.type == "cuda":
        return _on_gpu()
    fits = like.device.type == "cpu" and like.dtype == torch.bfloat16 and like.shape[-1] % multiple == 0
    return elementwise() if fits else None


def _address(x: torch.Tensor) -> int:
    assert x.dtype == torch.bfloat16 and x.is_contiguous(), (x.dtype, x.shape, x.stride())
    return x.data_ptr()
