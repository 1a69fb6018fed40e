"""The gate of a gated MLP. Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU)."""

import torch
from torch.nn import functional

from engine.kernels.elementwise import LANES, elementwise_for


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """[T, width]: silu(x[:, :width]) * x[:, width:] for x [T, 2 * width]; rounded after the silu and at the end."""
    kernel = elementwise_for(x, multiple=2 * LANES)
    if kernel is not None:
        return kernel.silu_mul(x)
    gate, up = torch.split(x, x.shape[-1] // 2, dim=-1)
    return functional.silu(gate).mul_(up)
