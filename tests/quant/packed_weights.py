"""Random matrices of every form that a GPU keeps packed, of odd sizes, too."""

from dataclasses import replace

import torch

from engine.quant.integers import Integers, mxfp4_codes

Size = tuple[int, int]  # outputs, inputs


def integers(size: Size, bits: int, group: int, *, zeros: bool, dtype: torch.dtype) -> Integers:
    """All values of `bits`; zero points and fp16 scales as in a checkpoint."""
    half, (outputs, inputs) = 1 << (bits - 1), size
    values = torch.randint(-half, half, size, dtype=torch.int8)
    scales = (torch.rand(outputs, -(-inputs // group)) + 0.5).half().float()
    offsets = -torch.randint(-half, half, scales.shape) * scales if zeros else None
    return Integers(values, scales, offsets, bits, group, dtype)


def fp8(size: Size, group: int, rows: int, dtype: torch.dtype) -> Integers:
    """All numbers of e4m3; a scale for `rows` outputs."""
    numbers = torch.randint(0, 256, size, dtype=torch.uint8)
    numbers[numbers & 127 == 127] = 1  # NaN
    scales = torch.rand(-(-size[0] // rows), -(-size[1] // group)).repeat_interleave(rows, dim=0)[: size[0]]
    return Integers(numbers.view(torch.float8_e4m3fn), scales.contiguous(), None, 8, group, dtype)


def mxfp4(size: Size, dtype: torch.dtype) -> Integers:
    blocks = torch.randint(0, 256, (size[0], size[1] // 32, 16), dtype=torch.uint8)
    return mxfp4_codes(blocks, torch.randint(120, 131, blocks.shape[:2], dtype=torch.uint8), dtype=dtype)


def weights(size: Size, dtype: torch.dtype) -> dict[str, Integers]:
    inputs = size[1]
    return {
        "fp8, blocks": fp8(size, 128, 64, dtype),
        "fp8, outputs": fp8(size, inputs, 1, dtype),
        "int8": integers(size, 8, inputs, zeros=False, dtype=dtype),
        "int8, zeros": integers(size, 8, 32, zeros=True, dtype=dtype),
        "int4": integers(size, 4, 32, zeros=False, dtype=dtype),
        "int4, zeros": integers(size, 4, 64, zeros=True, dtype=dtype),
        "int4, one group": integers(size, 4, inputs, zeros=True, dtype=dtype),
        "int4, offsets": with_offsets(integers(size, 4, 32, zeros=True, dtype=dtype)),
        "int8, offsets": with_offsets(integers(size, 8, inputs, zeros=True, dtype=dtype)),
        "mxfp4": mxfp4(size, dtype),
    }


def with_offsets(weight: Integers) -> Integers:
    """Which are no multiples of scales, as of ggml's Q4_K."""
    assert weight.offsets is not None
    return replace(weight, offsets=weight.offsets + torch.rand(weight.offsets.shape))
