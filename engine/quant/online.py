"""Quantizes float weights at load (`--quantization`), named as in torchao."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.integers import Integers

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
