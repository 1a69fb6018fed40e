"""Kernels by row: norms, rotary embedding, gates; sampling.

On CPU they are elementwise.c (bf16) and sample.c, on GPU Triton's. C trusts its arguments: shapes
and types are asserted before each call.
"""

import ctypes
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


ELEMENTWISE = CSource(
    "elementwise",
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
        x: Tensor,
        weight: Tensor,
        *,
        eps: float,
        delta: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        """Add `delta` to x [T, width] in place; return its RMS norm times weight + `offset`."""
        rows, width = x.shape
        assert weight.shape == (width,) and width % LANES == 0, (weight.shape, width)
        assert delta is None or delta.shape == x.shape, (delta, x.shape)
        out = tape.empty(x.shape, x.dtype)
        args = _Norm(
            *_addresses(x, delta, weight, out),
            rows=rows,
            width=width,
            eps=eps,
            offset=offset,
        )
        tape.call(self._kernels.tandem_offset_norm if offset else self._kernels.tandem_rms_norm, args)
        return out

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        """Add `delta` to x [T, width] in place."""
        rows, width = x.shape
        assert delta.shape == x.shape and width % LANES == 0, (x.shape, delta.shape)
        tape.call(self._kernels.tandem_add, _Norm(*_addresses(x, delta), rows=rows, width=width))
        return x

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x [T, width] in place."""
        rows, width = x.shape
        assert width % LANES == 0, x.shape
        tape.call(self._kernels.tandem_scale, _Norm(*_addresses(x), rows=rows, width=width, offset=factor))
        return x

    def norm_rope(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        *,
        weight: Tensor | None,
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
            x.data_ptr(),
            *_addresses(weight),
            *addresses(cosine, sine),
            x_stride=x.stride(0),
            turn_stride=cosine.stride(0),
            rows=rows,
            heads=heads,
            dim=dim,
            eps=eps,
            offset=offset,
        )
        tape.call(self._kernels.tandem_norm_turn, args)

    def silu_mul(self, x: Tensor) -> Tensor:
        """Return silu(x[:, :width]) * x[:, width:], [T, width]."""
        return self._gated(self._kernels.tandem_silu_mul, x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        """Tanh gelu instead of silu."""
        return self._gated(self._kernels.tandem_gelu_mul, x)

    def _gated(self, kernel: tape.Kernel, x: Tensor) -> Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        assert x.shape[1] == 2 * width and width % LANES == 0, x.shape
        out = tape.empty((rows, width), x.dtype)
        tape.call(kernel, _Gate(*_addresses(x, out), rows=rows, width=width))
        return out

    def sigmoid_mul(self, gates: Tensor, x: Tensor) -> Tensor:
        """Return sigmoid(gates) * x [T, width]; `gates` may be a column slice."""
        (rows, width), out = x.shape, tape.empty(x.shape, x.dtype)
        assert gates.shape == x.shape and gates.dtype == x.dtype and gates.stride(1) == 1 and width % LANES == 0, (
            x.shape
        )
        args = _SigmoidGate(
            gates.data_ptr(),
            *_addresses(x, out),
            gates_stride=gates.stride(0),
            rows=rows,
            width=width,
        )
        tape.call(self._kernels.tandem_sigmoid_mul, args)
        return out


elementwise = ELEMENTWISE.once(Elementwise)


def takes_triton(device: torch.device) -> bool:
    """True for a GPU where Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def _on_gpu() -> "TritonElementwise | None":
    if find_spec("triton") is None:
        return None
    from engine.kernels.triton.elementwise import TritonElementwise

    return TritonElementwise()


def elementwise_for(like: Tensor, *, multiple: int = LANES) -> "Elementwise | TritonElementwise | None":
    """Return norm and gate kernels for `like`, if any."""
    return _on_gpu() if like.device.type == "cuda" else elementwise_on_cpu(like, multiple=multiple)


def elementwise_on_cpu(like: Tensor, *, multiple: int = LANES) -> Elementwise | None:
    fits = like.device.type == "cpu" and like.dtype == torch.bfloat16 and like.shape[-1] % multiple == 0
    return elementwise() if fits else None


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """For the first members of a structure."""
    return [None if x is None else x.data_ptr() for x in tensors]


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    for x in tensors:
        assert x is None or (x.dtype == torch.bfloat16 and x.is_contiguous()), (x.dtype, x.shape, x.stride())
    return addresses(*tensors)


# ---- Token sampling on CPU, one pass per row without a sort.

MOST_TOKENS = 2**22  # vocabulary size whose sum of masses fits in an int64


class _Sample(ctypes.Structure):
    _fields_ = fields(
        ("logits", "rows", "best", "greedy", "keys", "temperature", "top_p", "log_min_p", "top_k", "tokens"),
        ("count", "vocab", "stride"),
    )


# noise has the same bits everywhere: no fused multiply-add
SAMPLE = CSource("sample", {"sample": _Sample}, flags=("-ffp-contract=off",))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Parameters of sampled `rows` int64[n] of the logits.

    `greedy` (first best token), `keys`, `top_k` (vocabulary size: off) are int64, others float32.
    """

    rows: Tensor
    best: Tensor
    greedy: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    def part(self, at: Tensor) -> "SampledRows":
        return SampledRows(*(getattr(self, field.name)[at] for field in dataclass_fields(self)))


class SampleKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        library.tandem_noise.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._library = library

    def sample(self, logits: Tensor, which: SampledRows) -> Tensor:
        """Return int64[n] tokens from float32 logits [any, V]. Raises MemoryError."""
        n, vocab_size = len(which.rows), logits.shape[1]
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and vocab_size <= MOST_TOKENS, logits.shape
        tokens = torch.empty(n, dtype=torch.int64)
        args = _Sample(
            logits=logits.data_ptr(),
            rows=_vector(which.rows, n, torch.int64),
            best=_vector(which.best, n, torch.float32),
            greedy=_vector(which.greedy, n, torch.int64),
            keys=_vector(which.keys, n, torch.int64),
            temperature=_vector(which.temperature, n, torch.float32),
            top_p=_vector(which.top_p, n, torch.float32),
            log_min_p=_vector(which.log_min_p, n, torch.float32),
            top_k=_vector(which.top_k, n, torch.int64),
            tokens=tokens.data_ptr(),
            count=n,
            vocab=vocab_size,
            stride=logits.stride(0),
        )
        if tape.call_once(self._library.tandem_sample, args):
            raise MemoryError("sample: no memory for the keys of top_k")
        return tokens

    def noise(self, bits: Tensor) -> Tensor:
        """sampling.noise_of for int64 bits, a multiple of 16."""
        assert len(bits) % 16 == 0, bits.shape
        words, noise = bits.to(torch.uint32), torch.empty(len(bits))
        self._library.tandem_noise(words.data_ptr(), noise.data_ptr(), len(bits))
        return noise


def _vector(x: Tensor, n: int, dtype: torch.dtype) -> int:
    assert x.shape == (n,) and x.dtype == dtype and x.is_contiguous(), (x.shape, x.dtype)
    return x.data_ptr()


sample_kernel = SAMPLE.once(SampleKernel)
