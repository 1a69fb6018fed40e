"""Checkpoints in their types and shapes alone, on the meta device."""

from typing import Any

import torch
from torch import Tensor

from engine.parallel.layout import Extent, cut_of
from engine.quant.integers import Integers

META = torch.device("meta")


class Unread:
    """A checkpoint in its types and shapes alone."""

    dtype_name, dtype, device, is_dummy = "bfloat16", torch.bfloat16, META, True

    def has(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: list[Extent], *, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty([len(cut_of(size)) for size in shape], dtype=dtype or self.dtype, device=META)

    def take_rows(self, names: list[str], rows: list[Extent], rest: list[Extent], **dtype: Any) -> Tensor:
        return self.take("", [sum(len(cut_of(count)) for count in rows), *rest], **dtype)

    def take_integers(self, *_: object) -> None:
        """It has none."""

    def ignore(self, name: str) -> None:
        """It has no tensors."""


class PackedExperts(Unread):
    """Its experts are quantized; gpt-oss's are MXFP4."""

    def has(self, name: str) -> bool:
        return name.endswith("_blocks")

    def take_bytes(self, name: str, shape: list[Extent]) -> Tensor:
        return torch.full([len(cut_of(size)) for size in shape], 127, dtype=torch.uint8)

    def take_integers(self, names: list[str], rows: list[Extent], inputs: Extent, *_: object) -> Integers | None:
        if "experts." not in names[0] or "shared" in names[0]:
            return None
        outputs, width = sum(len(cut_of(count)) for count in rows), len(cut_of(inputs))
        values = torch.zeros(outputs, width, dtype=torch.int8)
        return Integers(values, torch.ones(outputs, 1), None, 8, width, self.dtype)
