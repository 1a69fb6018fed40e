"""Matrices of a checkpoint as weights of layers: as they are stored, or quantized on load."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.models.checkpoint import Checkpoint
from engine.parallel.layout import Extent, cut_of
from engine.quant.integers import HEAD, Scheme, Weight, columns_of, quantized
from service.flags import ConfigError


class Matrices(Protocol):
    """`names`, `rows`, `inputs`, `segments`, `factors`: as of `ModelPart.matrix`."""

    def matrix(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        rows: Sequence[Extent],
        inputs: Extent,
        *,
        segments: int,
        factors: Sequence[float],
    ) -> Weight: ...

    def head(
        self, checkpoint: Checkpoint, name: str, rows: Extent, inputs: int, *, table: Callable[[], Tensor]
    ) -> Weight:
        """Load the head `name`; `table` reads it as floats."""

    def read_inputs(self, name: str, inputs: Extent, segments: int) -> Extent:
        """Return the inputs that `rounded` needs. Raises ConfigError."""

    def rounded(self, weight: Tensor, inputs: Extent) -> Weight:
        """Return the own inputs of `weight`, a matrix of `read_inputs`."""


class StoredMatrices:
    """Floats, or integers where the checkpoint has them."""

    def matrix(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        rows: Sequence[Extent],
        inputs: Extent,
        *,
        segments: int,
        factors: Sequence[float],
    ) -> Weight:
        integers = checkpoint.take_integers(names, rows, inputs, factors)
        return _floats(checkpoint, names, rows, inputs, factors) if integers is None else integers

    def head(
        self, checkpoint: Checkpoint, name: str, rows: Extent, inputs: int, *, table: Callable[[], Tensor]
    ) -> Weight:
        integers = checkpoint.take_integers([name], [rows], inputs)
        return table() if integers is None else integers

    def read_inputs(self, name: str, inputs: Extent, segments: int) -> Extent:
        return inputs

    def rounded(self, weight: Tensor, inputs: Extent) -> Weight:
        return weight


STORED = StoredMatrices()


class QuantizedMatrices:
    """Floats of the checkpoint, quantized by `scheme`."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def matrix(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        rows: Sequence[Extent],
        inputs: Extent,
        *,
        segments: int,
        factors: Sequence[float],
    ) -> Weight:
        read = self.read_inputs(names[0], inputs, segments)
        return self.rounded(_floats(checkpoint, names, rows, read, factors), inputs)

    def head(
        self, checkpoint: Checkpoint, name: str, rows: Extent, inputs: int, *, table: Callable[[], Tensor]
    ) -> Weight:
        return quantized(table(), HEAD)

    def read_inputs(self, name: str, inputs: Extent, segments: int) -> Extent:
        cut, group = cut_of(inputs), self._scheme.group
        parts = cut.total // len(cut) * segments
        if group and parts > 1 and cut.total // parts % group:
            raise ConfigError(
                f"--quantization: groups of {group} inputs do not divide a part of {name}, {cut.total} inputs in {parts} "
                "parts (--tp-size, --reduce-units); take smaller groups or int8wo, or fewer parts"
            )
        return inputs if group else cut.total  # one scale on all ranks

    def rounded(self, weight: Tensor, inputs: Extent) -> Weight:
        whole, own = quantized(weight, self._scheme), cut_of(inputs).taken
        return whole if self._scheme.group else columns_of(whole, slice(own.start, own.stop))


def _floats(
    checkpoint: Checkpoint, names: Sequence[str], rows: Sequence[Extent], inputs: Extent, factors: Sequence[float]
) -> Tensor:
    if not factors or set(factors) == {1.0}:
        return checkpoint.take_rows(names, rows, [inputs])
    weight = checkpoint.take_rows(names, rows, [inputs], dtype=torch.float32)
    for part, factor in zip(torch.split(weight, [len(cut_of(cut)) for cut in rows]), factors, strict=True):
        part.mul_(factor)
    return weight.to(checkpoint.dtype)
