"""What stands between the two products of an MLP of a vision tower, where nothing gates: functions that change their argument."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def gelu(x: Tensor) -> Tensor:
    """Compute gelu by the error function."""
    return torch.ops.aten.gelu_(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x): CLIP's."""
    return x.mul_(torch.sigmoid(1.702 * x))


def silu(x: Tensor) -> Tensor:
    return functional.silu(x, inplace=True)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
}
