"""Packed bf16 or integer matrices for linear.c, and their products."""

import ctypes
from enum import IntEnum
from typing import NamedTuple

import torch

from engine.kernels import tape
from engine.kernels.build import CSource, Kind, fields
from engine.kernels.integer_layout import fits, group_steps, packed_bytes, packed_parts, step_bytes
from engine.kernels.tape import PackedMemory
from engine.quant.integers import Integers, Weight

PANEL = 32  # outputs per panel, and inputs per step
LANES = 16  # inputs are a multiple of it if rows are normalized before the product

_POINTERS = ("x", "weight", "bias", "y", "norm", "delta")
_NUMBERS = ("rows", "inputs", "outputs", "segments", "x_stride", "form", "interleaved", "gated", "kind")
_INTEGERS = ("bits", "group", "offsets", "e2m1")


class Form(IntEnum):
    """Type of a result; ROUNDED_F32 has the values of BF16."""

    BF16 = 0
    ROUNDED_F32 = 1
    F32 = 2


class LinearArgs(ctypes.Structure):
    """`struct args` of linear.c."""

    _fields_ = fields(_POINTERS, (*_NUMBERS, *_INTEGERS), ("eps",))


class _Packing(ctypes.Structure):
    _fields_ = fields(("weight", "to"), ("outputs", "inputs", "segments", "interleaved"))


class _Each(ctypes.Structure):
    _fields_ = [("like", LinearArgs), *fields(("rows",), ("matrices", "apart"))]


SOURCE = CSource("linear", {"linear": LinearArgs, "linear_pack": _Packing, "linear_each": _Each})


class PackedWeights(NamedTuple):
    """Matrices in linear.c's layout, `apart` bytes each."""

    weight: torch.Tensor
    apart: int
    bits: int = 0
    group: int = 0
    offsets: bool = False
    e2m1: bool = False

    def fill(self, args: LinearArgs) -> None:
        """Set the first matrix; `self` must outlive `args`."""
        args.weight, args.bits, args.group = self.weight.data_ptr(), self.bits, self.group
        args.offsets, args.e2m1 = self.offsets, self.e2m1


def pack(kernel: "LinearKernel", matrices: list[Weight], *, segments: int, gates: bool) -> PackedWeights:
    """Pack matrices of one shape and kind, dropping each."""
    first = matrices[0]
    outputs, inputs = first.shape
    if isinstance(first, Integers):
        return _pack_integers(kernel.memory, matrices, segments=segments, gates=gates)
    steps = -(-outputs // PANEL) * segments * -(-(inputs // segments) // PANEL)
    apart = steps * step_bytes(16)
    memory = kernel.memory.allocate(len(matrices) * apart)
    for index, matrix in enumerate(matrices):
        assert isinstance(matrix, torch.Tensor) and matrix.shape == first.shape, "of one kind"
        dense = matrix.contiguous()
        matrices[index] = dense[:0]
        to = memory.data_ptr() + index * apart
        tape.call_once(
            kernel.library.tandem_linear_pack, _Packing(dense.data_ptr(), to, outputs, inputs, segments, gates)
        )
    return PackedWeights(memory, apart)


def _pack_integers(whole: PackedMemory, matrices: list[Weight], *, segments: int, gates: bool) -> PackedWeights:
    own = [matrix for matrix in matrices if isinstance(matrix, Integers)]
    first = own[0]
    groups_fit = fits(first, segments=segments)
    assert groups_fit, "groups are whole steps of a segment"
    assert len({(one.kind, one.shape) for one in own}) == 1 and len(own) == len(matrices), "of one kind"
    matrices[:] = [one.scales[:0] for one in own]
    offsets = any(one.offsets is not None for one in own)
    apart = packed_bytes(first, segments=segments, offsets=offsets)
    memory, at = whole.allocate(len(own) * apart), 0
    while own:
        for part in packed_parts(own.pop(0), segments=segments, gates=gates, offsets=offsets):
            memory[at : at + len(part)] = part
            at += len(part)
    assert at == len(memory), (at, len(memory))
    return PackedWeights(memory, apart, first.bits, group_steps(first, segments=segments), offsets, first.e2m1)


class _Packed:
    """bf16 or integer `matrices` [out, in] of one shape in huge pages; drops them. Thread-safe.

    `gates`: the first output half may gate the second; out is a multiple of PANEL. `segments` (a
    power of two dividing the inputs) are summed separately, then in a binary tree. A result row's
    bits depend only on its row of x and its matrix.
    """

    def __init__(
        self,
        kernel: "LinearKernel",
        matrices: list[Weight],
        bias: torch.Tensor | None = None,
        *,
        gates: bool = False,
        segments: int = 1,
    ) -> None:
        outputs, inputs = self._shape = tuple(matrices[0].shape)
        assert not gates or outputs % PANEL == 0, self._shape
        assert inputs % segments == 0 and segments & (segments - 1) == 0, (self._shape, segments)
        self.gates, self._library, self._count = gates, kernel.library, len(matrices)
        self._weight = pack(kernel, matrices, segments=segments, gates=gates)
        self._bias = None if bias is None else bias.contiguous()
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self._args = LinearArgs(
            bias=bias_at, inputs=inputs, outputs=outputs, segments=segments, interleaved=gates, kind=kernel.kind
        )
        self._weight.fill(self._args)

    def _own_args(self) -> LinearArgs:
        """Copy the arguments: two threads may multiply at once."""
        return LinearArgs.from_buffer_copy(self._args)

    def _result(self, args: LinearArgs, x: torch.Tensor, form: Form) -> torch.Tensor:
        outputs, inputs = self._shape
        assert x.dtype == torch.bfloat16 and x.shape[1:] == (inputs,) and x.stride(1) == 1, (x.shape, x.dtype)
        dtype = torch.bfloat16 if form is Form.BF16 else torch.float32
        y = tape.empty((len(x), outputs // 2 if args.gated else outputs), dtype)
        args.x, args.x_stride, args.rows = x.data_ptr(), x.stride(0), len(x)
        args.y, args.form = y.data_ptr(), form
        return y


class PackedMatrix(_Packed):
    """One matrix, with a bf16 `bias` [out]."""

    def times(self, x: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return [T, out] for bf16 x [T, in]: summed in fp32, rounded to bf16."""
        return self._product(self._own_args(), self._rows(x), Form.ROUNDED_F32 if dtype == torch.float32 else Form.BF16)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return unrounded fp32 sums [T, out], to be added to other ranks'."""
        return self._product(self._own_args(), self._rows(x), Form.F32)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1:] == (self._shape[1],), (x.shape, self._shape)
        return x if x.stride(1) == 1 else x.contiguous()

    @property
    def takes_norms(self) -> bool:
        return self._shape[1] % LANES == 0

    def times_normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        delta: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Return the product with `Elementwise.rms_norm`; `gated` adds `silu_mul`: [T, out / 2]."""
        inputs = self._shape[1]
        assert self.takes_norms and x.shape[1:] == (inputs,) and x.stride(1) == 1, (x.shape, self._shape)
        assert weight.dtype == torch.bfloat16 and weight.shape == (inputs,) and weight.is_contiguous(), weight.shape
        assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype and delta.is_contiguous()), delta
        assert self.gates or not gated, self._shape
        args = self._own_args()
        args.norm, args.eps, args.delta = weight.data_ptr(), eps, None if delta is None else delta.data_ptr()
        args.gated = gated
        return self._product(args, x, Form.BF16)

    def _product(self, args: LinearArgs, x: torch.Tensor, form: Form) -> torch.Tensor:
        y = self._result(args, x, form)
        if tape.call(self._library.tandem_linear, args):
            raise MemoryError("linear: no memory for the rows of one product")
        return y


class LinearKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.kind = Kind(library.tandem_linear_kind())
        self.library = library
        self.memory = PackedMemory()

    def pack(
        self, weight: Weight, bias: torch.Tensor | None, *, gates: bool = False, segments: int = 1
    ) -> PackedMatrix:
        return PackedMatrix(self, [weight], bias, gates=gates, segments=segments)


linear_kernel = SOURCE.once(LinearKernel)


class PackedMatrices(_Packed):
    """Experts of a layer, or other matrices that each multiply their own rows."""

    def take(self, other: "PackedMatrices") -> None:
        """Take over `other`'s memory, of the same shape."""
        assert (self._count, self._shape) == (other._count, other._shape), (self._shape, other._shape)
        self._weight, self._args = other._weight, other._args

    def times(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return bf16[T, out] for x [T, in], sorted by matrix with i64 counts `rows`."""
        return self._product(x, rows, Form.BF16, gated=False)

    def gated(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return `silu_mul` of `times`: [T, out / 2]."""
        return self._product(x, rows, Form.BF16, gated=True)

    def partial(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return unrounded fp32 sums [T, out]."""
        return self._product(x, rows, Form.F32, gated=False)

    def _product(self, x: torch.Tensor, rows: torch.Tensor, form: Form, *, gated: bool) -> torch.Tensor:
        assert rows.dtype == torch.int64 and rows.shape == (self._count,) and rows.is_contiguous(), rows.shape
        like = self._own_args()
        like.gated = gated
        y = self._result(like, x, form)
        args = _Each(like=like, rows=rows.data_ptr(), matrices=self._count, apart=self._weight.apart)
        if tape.call(self._library.tandem_linear_each, args):
            raise MemoryError("linear: no memory for the rows of one product")
        return y
