"""The gated MLP of Llama-like models. Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU)."""

import torch
from torch.nn import functional

from engine.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix [2 * intermediate, hidden]."""

    def __init__(self, *, gate_up: Linear, down: Linear, intermediate_size: int) -> None:
        self.gate_up = gate_up
        self.down = down
        self._intermediate_size = intermediate_size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.split(self.gate_up(x), self._intermediate_size, dim=-1)
        return self.down(functional.silu(gate).mul_(up))
