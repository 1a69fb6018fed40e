"""What stands between the products of an MLP: activation(gate) * up of its two halves, or an activation alone."""

from collections.abc import Callable

import torch
from torch.nn import functional

from engine.kernels.elementwise import LANES, elementwise_on_cpu
from engine.layers.linear import silu_mul


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """[T, width]: gelu(x[:, :width]) * x[:, width:] for x [T, 2 * width], gelu by tanh; rounded after the gelu and at the end.

    Shazeer 2020, "GLU Variants Improve Transformer" (GeGLU).
    """
    kernel = elementwise_on_cpu(x, multiple=2 * LANES)
    if kernel is not None:
        return kernel.gelu_mul(x)
    gate, up = torch.split(x, x.shape[-1] // 2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """[T, width] of x [T, width], by tanh."""
    return functional.gelu(x, approximate="tanh")


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_mul,
    "gelu_tanh alone": gelu,
}
