"""What stands between the two products of an MLP of a vision tower, where nothing gates."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers import gates


def gelu(x: Tensor) -> Tensor:
    """By the error function."""
    return functional.gelu(x)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x): CLIP's."""
    return torch.sigmoid(1.702 * x).mul_(x)


def silu(x: Tensor) -> Tensor:
    return functional.silu(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": gates.gelu,
    "quick_gelu": quick_gelu,
    "silu": silu,
}
