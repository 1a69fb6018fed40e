"""Packed matrices of one shape (a layer's experts), each multiplied by its own rows."""

import ctypes

import torch

from engine.kernels import tape
from engine.kernels.build import fields
from engine.kernels.linear import PANEL, Form, LinearArgs, LinearKernel, pack
from engine.quant.integers import Weight


class _Each(ctypes.Structure):
    _fields_ = [("like", LinearArgs), *fields(("rows",), ("matrices", "apart"))]


class PackedMatrices:
    """Packed [out, in] `matrices`; inputs are dropped. `gates`: the first half gates the second.

    A result row's bits depend only on its row and matrix. Thread-safe.
    """

    def __init__(self, kernel: LinearKernel, matrices: list[Weight], *, gates: bool = False) -> None:
        outputs, inputs = matrices[0].shape
        assert not gates or outputs % PANEL == 0, matrices[0].shape
        self._count, self._shape = len(matrices), (outputs, inputs)
        self._kind = kernel.kind
        self._call = kernel.library.tandem_linear_each
        self._call.argtypes = [ctypes.POINTER(_Each)]
        self.gates = gates
        self._weight = pack(kernel, matrices, segments=1, gates=gates)

    def take(self, other: "PackedMatrices") -> None:
        """Take over `other`'s memory, of the same shape."""
        assert (self._count, self._shape) == (other._count, other._shape), (self._shape, other._shape)
        self._weight = other._weight

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
        outputs, inputs = self._shape
        assert x.dtype == torch.bfloat16 and x.shape[1:] == (inputs,) and x.stride(1) == 1, (x.shape, x.dtype)
        assert rows.dtype == torch.int64 and rows.shape == (self._count,) and rows.is_contiguous(), rows.shape
        dtype = torch.float32 if form is Form.F32 else torch.bfloat16
        y = tape.empty((len(x), outputs // 2 if gated else outputs), dtype)
        like = LinearArgs(
            x=x.data_ptr(),
            y=y.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            segments=1,
            x_stride=x.stride(0),
            form=form,
            interleaved=self.gates,
            gated=gated,
            kind=self._kind,
        )
        self._weight.fill(like)
        args = _Each(like=like, rows=rows.data_ptr(), matrices=self._count, apart=self._weight.apart)
        if tape.call(self._call, args):
            raise MemoryError("linear: no memory for the rows of one product")
        return y
