"""Integer or fp8 matrices with scales, maybe offsets, per group of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))  # by 4 bits: sign, 2 exponent, 1 mantissa


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix [out, in]: scales * values + offsets.

    `values` [out, in] int8, of 4 `bits` (-8 to 7) or 8, or e4m3. `scales`, `offsets`: fp32 [out,
    ceil(in / group)]. `dtype`: of products. `e2m1`: value + 8 indexes E2M1, groups
    of 32, scales are powers of two.
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
        assert self.values.dtype == torch.int8 or (self.is_float and self.bits == 8), (self.bits, self.values.dtype)
        assert self.scales.shape == groups and self.scales.dtype == torch.float32, (self.scales.shape, groups)
        assert self.offsets is None or (self.offsets.shape == groups and self.offsets.dtype == torch.float32), groups

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_float(self) -> bool:
        return self.values.dtype == torch.float8_e4m3fn

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        """Equal for matrices that can be concatenated."""
        return self.bits, self.group, self.e2m1, self.is_float

    def stacks_with(self, other: "Integers") -> bool:
        """True if one matrix can hold both; 4 bits may become 8."""
        are_integers = not any(one.e2m1 or one.is_float for one in (self, other))
        return self.kind == other.kind or (self.group == other.group and are_integers)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def times(self, factor: float) -> "Integers":
        offsets = None if self.offsets is None else self.offsets * factor
        return replace(self, scales=self.scales * factor, offsets=offsets)

    def to(self, device: torch.device) -> "Integers":
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)

    def dense(self) -> Tensor:
        """[out, in] in `dtype`, each value rounded once."""
        inputs = self.shape[1]
        values = torch.tensor(E2M1, device=self.device)[self.values.int() + 8] if self.e2m1 else self.values
        values = values.float() if self.is_float else values
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
    """The inputs `columns`: floats, if they cut groups."""
    if isinstance(weight, Tensor):
        return weight[:, columns]
    values, group = weight.values[:, columns], min(weight.group, columns.stop - columns.start)
    if weight.scales.shape[1] == 1:
        return replace(weight, values=values, group=group)
    if columns.start % weight.group or (columns.stop % weight.group and columns.stop != weight.shape[1]):
        return weight.dense()[:, columns]
    groups = slice(columns.start // weight.group, -(-columns.stop // weight.group))
    offsets = None if weight.offsets is None else weight.offsets[:, groups]
    return replace(weight, values=values, scales=weight.scales[:, groups], offsets=offsets)


# ---- Quantizes float weights at load (`--quantization`), named as in torchao.

ROWS_AT_ONCE = 4096  # in fp32 at once


@dataclass(frozen=True, slots=True)
class Scheme:
    """How numbers are packed.

    `group`: inputs per scale and offset; 0 for one scale per row, no offset.
    """

    bits: int
    group: int


SCHEMES = {
    "int8wo": Scheme(8, 0),
    "int4wo-32": Scheme(4, 32),
    "int4wo-64": Scheme(4, 64),
    "int4wo-128": Scheme(4, 128),
}
HEAD = SCHEMES["int8wo"]  # of every scheme, because sampling reads its output


def quantized(weight: Tensor, scheme: Scheme) -> Integers:
    """Round `weight` [out, in] to nearest; the last group may be shorter."""
    parts = [_rounded(part.float(), scheme) for part in torch.split(weight, ROWS_AT_ONCE)]
    values, scales, offsets = zip(*parts, strict=True)
    return Integers(
        torch.cat(values),
        torch.cat(scales),
        torch.cat(offsets) if scheme.group else None,
        scheme.bits,
        scheme.group or weight.shape[1],
        weight.dtype,
    )


def _rounded(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    if not scheme.group:
        scales = _no_zeros(weight.abs().amax(dim=1, keepdim=True) / 127)
        return (weight / scales).round_().to(torch.int8), scales, scales
    rows, inputs = weight.shape
    short = -inputs % scheme.group  # repeat the last value, which keeps min and max
    filled = torch.cat((weight, weight[:, -1:].expand(-1, short)), dim=1).view(rows, -1, scheme.group)
    least, most = filled.aminmax(dim=2)
    scales = _no_zeros((most - least) / 15)
    values = ((filled - least[..., None]) / scales[..., None]).round_().sub_(8)
    return values.to(torch.int8).view(rows, -1)[:, :inputs], scales, least + 8 * scales


def _no_zeros(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


# ---- MXFP4 of gpt-oss

BLOCK = 32  # values that share a scale
BIAS = 127
NAN_SCALE = 255


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """[..., n * 32] in `dtype` from `blocks` [..., n, 16] uint8, low nibble first.

    `scales` [..., n] uint8 are exponents plus 127 (255: NaN).

    Source: Open Compute Project, "Microscaling Formats (MX) Specification" 1.0.
    """
    assert blocks.dtype == scales.dtype == torch.uint8, (blocks.dtype, scales.dtype)
    assert blocks.shape == (*scales.shape, BLOCK // 2), (blocks.shape, scales.shape)
    both = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    values = torch.stack([both[(blocks & 15).long()], both[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (values * _powers(scales)[..., None]).to(dtype).flatten(-2)


def mxfp4_codes(blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype) -> Integers:
    """A matrix of `blocks` [rows, n, 16], `scales` [rows, n], still packed."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(torch.int8) - 8
    return Integers(codes.flatten(1), _powers(scales), None, 4, BLOCK, dtype, e2m1=True)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - BIAS)
    return powers.masked_fill_(scales == NAN_SCALE, torch.nan)
