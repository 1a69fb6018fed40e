"""A quantized checkpoint under the tensor names of a float one; packed integers of a GGUF file."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.kernels.rows import takes_triton
from engine.layers.linear import kernel_on
from engine.model_files.stored_weights import StoredWeights
from engine.quant.ggml import BLOCK_TYPES, GROUP, integers_of
from engine.quant.integers import Integers, Weight, columns_of
from engine.quant.stored import KV_SCALES, MAIN, OTHERS, ShapeError, Source, read
from service.flags import ConfigError

if TYPE_CHECKING:
    from engine.gguf.tensors import GGUFTensors


def keeps_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """True where a kernel multiplies packed integers."""
    return kernel_on(device, dtype) is not None or takes_triton(device)


class Files(Protocol):
    described_by: str

    def names(self) -> Collection[str]: ...

    def where(self, name: str) -> str: ...

    def open(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Callable[[Tensor], object]: ...

    def stored(self, name: str) -> Tensor: ...

    def shape_of(self, name: str) -> list[int]: ...

    def close(self) -> None: ...


class QuantizedTensors:
    """Quantized modules as one tensor each."""

    def __init__(self, files: Files, stored: StoredWeights) -> None:
        self._files, self._stored = files, stored
        self.described_by = files.described_by
        self._all = frozenset(files.names())
        self._modules = {name.rpartition(".")[0] for name in self._all if name.rpartition(".")[2] in MAIN}
        self._parts = {f"{module}.{part}" for module in self._modules for part in (*MAIN, *OTHERS)}

    def names(self) -> set[str]:
        plain = {name for name in self._all - self._parts if name.rpartition(".")[2] not in KV_SCALES}
        return plain | {f"{module}.weight" for module in self._modules}

    def where(self, name: str) -> str:
        if self._is_quantized(name):
            module = name.removesuffix(".weight")
            name = next(part for main in MAIN if (part := f"{module}.{main}") in self._all)
        return self._files.where(name)

    def open(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Callable[[Tensor], object]:
        if not self._is_quantized(name):
            return self._files.open(name, shape, taken)
        weight = self._read(name, shape, taken, torch.float32)
        floats = weight if isinstance(weight, Tensor) else weight.dense()
        return lambda out: out.copy_(floats)

    def integers(
        self, name: str, shape: Sequence[int], taken: Sequence[range], dtype: torch.dtype, *, device: torch.device
    ) -> Integers | None:
        if not self._is_quantized(name):
            return None
        weight = self._read(name, shape, taken, dtype, e4m3=takes_triton(device))
        return weight if isinstance(weight, Integers) else None

    def shape_of(self, name: str) -> list[int]:
        return self._files.shape_of(name)

    def close(self) -> None:
        self._files.close()

    def _is_quantized(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self._modules

    def _read(
        self, name: str, shape: Sequence[int], taken: Sequence[range], dtype: torch.dtype, *, e4m3: bool = False
    ) -> Weight:
        module = name.removesuffix(".weight")

        def get(suffix: str) -> Tensor | None:
            part = f"{module}.{suffix}"
            return self._files.stored(part) if part in self._all else None

        outputs, inputs = shape
        try:
            return read(self._stored, Source(get, (outputs, inputs), taken[0], taken[1], dtype, e4m3))
        except ShapeError as error:
            raise ConfigError(f"{self.where(name)}: {module}: {error}") from None


def packed_gguf(
    tensors: "GGUFTensors", name: str, shape: Sequence[int], taken: Sequence[range], dtype: torch.dtype
) -> Integers | None:
    """The `taken` part of a matrix, in groups of 32; None if type or cut does not fit groups."""
    kind, columns = BLOCK_TYPES.get(tensors.type_of(name)), taken[1]
    if kind is None or columns.start % GROUP or columns.stop % GROUP:
        return None
    blocks, place = tensors.blocks(name, shape, taken)
    whole = integers_of(kind, blocks, dtype)
    return whole if len(columns) == whole.shape[1] else columns_of(whole, place)
