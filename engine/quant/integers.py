"""Integer matrices with scales, maybe offsets, per group of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model_files.stored_weights import Packing

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))  # by 4 bits: sign, 2 exponent, 1 mantissa


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix [out, in]: scales * values + offsets.

    `values` [out, in] int8, of 4 `bits` (-8 to 7) or 8. `scales`, `offsets`: fp32 [out, ceil(in /
    group)]. `dtype`: of products. `e2m1`: value + 8 indexes E2M1.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    group: int
    dtype: torch.dtype
    e2m1: bool = False

    def __post_init__(self) -> None:
        groups = (len(self.values), -(-self.values.shape[1] // self.group))
        assert self.bits in (4, 8) and (self.bits == 4 or not self.e2m1), (self.bits, self.e2m1)
        assert self.values.dtype == torch.int8, (self.bits, self.values.dtype)
        assert self.scales.shape == groups and self.scales.dtype == torch.float32, (self.scales.shape, groups)
        assert self.offsets is None or (self.offsets.shape == groups and self.offsets.dtype == torch.float32), groups

    def __len__(self) -> int:
        return len(self.values)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Equal for matrices that can be concatenated."""
        return self.bits, self.group, self.e2m1

    def stacks_with(self, other: "Integers") -> bool:
        """True if one matrix can hold both; 4 bits may become 8."""
        return self.kind == other.kind or (self.group == other.group and not self.e2m1 and not other.e2m1)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def size_bytes(self) -> int:
        return Packing(self.bits, self.group, self.offsets is not None).size_bytes(*self.shape)

    def times(self, factor: float) -> "Integers":
        offsets = None if self.offsets is None else self.offsets * factor
        return replace(self, scales=self.scales * factor, offsets=offsets)

    def to(self, device: torch.device) -> "Integers":
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)

    def dense(self) -> Tensor:
        """[out, in] in `dtype`, each value rounded once."""
        inputs = self.shape[1]
        values = torch.tensor(E2M1)[self.values.int() + 8] if self.e2m1 else self.values
        each = self.scales.repeat_interleave(self.group, dim=1)[:, :inputs] * values
        if self.offsets is not None:
            each += self.offsets.repeat_interleave(self.group, dim=1)[:, :inputs]
        return each.to(self.dtype)


Weight = Tensor | Integers


def dense_of(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense()


def rows_of(weight: Weight, order: Sequence[int]) -> Weight:
    index = list(order)
    if isinstance(weight, Tensor):
        return weight[index]
    offsets = None if weight.offsets is None else weight.offsets[index]
    return replace(weight, values=weight.values[index], scales=weight.scales[index], offsets=offsets)


def stacked(parts: Sequence[Integers]) -> Integers:
    first = parts[0]
    fit = [part.stacks_with(first) for part in parts]
    assert all(fit), parts
    offsets = []
    if any(part.offsets is not None for part in parts):
        offsets = [torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts]
    return replace(
        first,
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
        bits=max(part.bits for part in parts),
    )


def columns_of(weight: Weight, columns: slice) -> Weight:
    """The inputs `columns`, at group boundaries."""
    if isinstance(weight, Tensor):
        return weight[:, columns]
    values, group = weight.values[:, columns], min(weight.group, columns.stop - columns.start)
    if weight.scales.shape[1] == 1:
        return replace(weight, values=values, group=group)
    assert columns.start % weight.group == columns.stop % weight.group == 0, (columns, weight.group)
    groups = slice(columns.start // weight.group, columns.stop // weight.group)
    offsets = None if weight.offsets is None else weight.offsets[:, groups]
    return replace(weight, values=values, scales=weight.scales[:, groups], offsets=offsets)
