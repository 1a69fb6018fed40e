"""Matrices of a checkpoint as weights of layers: as they are stored, or quantized on load."""

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.models.checkpoint import Checkpoint
from engine.parallel.layout import Extent, cut_of
from engine.quant.integers import HEAD, Scheme, Weight, columns_of, quantized
from service.flags import ConfigError


class Matrices:
    """Matrices as they are stored: integers, or floats."""

    def taken(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        rows: Sequence[Extent],
        inputs: Extent,
        factors: Sequence[float],
        *,
        floats: Callable[[], Weight],
    ) -> Weight:
        """Integers of the checkpoint, or what `floats` loads.

        Other arguments: as of `take_integers`.
        """
        integers = checkpoint.take_integers(names, rows, inputs, factors)
        return floats() if integers is None else integers

    def read_inputs(self, name: str, inputs: Extent, segments: int) -> Extent:
        """The inputs that `rounded` needs. Raises ConfigError."""
        return inputs

    def rounded(self, weight: Tensor, inputs: Extent) -> Weight:
        return weight

    def rounded_head(self, table: Tensor) -> Weight:
        return table


STORED = Matrices()


class QuantizedMatrices(Matrices):
    """Floats of the checkpoint, quantized by `scheme`."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def taken(self, *_: object, floats: Callable[[], Weight]) -> Weight:
        return floats()

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

    def rounded_head(self, table: Tensor) -> Weight:
        return quantized(table, HEAD)
