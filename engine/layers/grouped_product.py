"""Grouped products without our C kernel."""

import torch
from torch import Tensor
from torch.nn import functional


def grouped_product(x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """x [T, in] sorted by expert, `weights` [experts, in, out], `rows` [experts] i64 -> [T, out].

    Without host sync, for CUDA graphs. Rows after the last expert's are undefined.
    """
    ends = rows.cumsum(0)
    if weights.is_cuda and weights.dtype != torch.bfloat16:
        return _product_by_expert(x, weights, ends)
    return functional.grouped_mm(x, weights, offs=ends.to(torch.int32))


def _product_by_expert(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """All rows by each expert: torch's grouped product syncs with the host except for bf16."""
    places = torch.arange(len(x), device=x.device).unsqueeze(1)
    product = x @ weights[0]
    for expert in range(1, len(weights)):
        product = torch.where(places < ends[expert - 1], product, x @ weights[expert])
    return product
