"""MXFP4 equals transformers' converter to the bit."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.quant.integers import mxfp4_codes, mxfp4_values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_nibble_and_scale_has_transformers_value(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 5, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 5), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(mxfp4_values(blocks, scales, dtype=dtype), expected)
    assert all(
        torch.equal(mxfp4_codes(*one, dtype=dtype).dense(), own)
        for *one, own in zip(blocks, scales, expected, strict=True)
    )


def test_ends_of_the_scales_and_the_first_nibble() -> None:
    blocks = torch.full((3, 16), 0x21, dtype=torch.uint8)  # 0.5 and then 1.0
    values = mxfp4_values(blocks, torch.tensor([0, 254, 255], dtype=torch.uint8), dtype=torch.float32).view(3, 32)
    assert values[0, :2].tolist() == [2.0**-128, 2.0**-127]
    assert values[1, :2].tolist() == [2.0**126, 2.0**127]
    assert values[2].isnan().all()
