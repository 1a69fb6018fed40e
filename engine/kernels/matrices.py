"""Many matrices of one shape, bf16 or integers, packed for linear.c, each multiplied by rows of its own: the experts of a layer."""

import ctypes

import torch

from engine.kernels import tape
from engine.kernels.build import fields
from engine.kernels.linear import PANEL, Form, LinearArgs, LinearKernel, pack
from engine.quant.integers import Weight


class _Each(ctypes.Structure):
    """Mirror of `struct each` in linear.c."""

    _fields_ = [("like", LinearArgs), *fields(("rows",), ("matrices", "apart"))]


class PackedMatrices:
    """`matrices`: [out, in] each, which are dropped one by one. `gates`: the first half of the outputs gates the second.

    A row of the result depends on that row and its matrix alone, to the bit. It drops the GIL; threads may multiply at the same time.
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
        """Become `other`, of the same shape."""
        assert (self._count, self._shape) == (other._count, other._shape), (self._shape, other._shape)
        self._weight = other._weight

    def times(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[T, out] bf16 for x [T, in] bf16, of which `rows` [matrices] i64 belong to each matrix, one behind the other."""
        return self._product(x, rows, Form.BF16, gated=False)

    def gated(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[T, out / 2]: `silu_mul` of `times`."""
        return self._product(x, rows, Form.BF16, gated=True)

    def partial(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[T, out] fp32: the sums of `times`, not rounded."""
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
