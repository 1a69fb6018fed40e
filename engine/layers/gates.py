"""MLP activations."""

from collections.abc import Callable

import torch
from torch.nn import functional

from engine.kernels.elementwise import LANES, elementwise_on_cpu
from engine.layers.linear import silu_mul


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(x[:, :width]) * x[:, width:], tanh gelu; rounds after the gelu and at the end.

    GeGLU: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    kernel = elementwise_on_cpu(x, multiple=2 * LANES)
    if kernel is not None:
        return kernel.gelu_mul(x)
    gate, up = torch.split(x, x.shape[-1] // 2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_mul,
    "gelu_tanh alone": gelu,
}
