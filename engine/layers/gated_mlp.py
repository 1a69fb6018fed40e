"""The gated MLP of Llama-like models. Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU)."""

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix [2 * intermediate, hidden] that `gates`."""

    def __init__(self, *, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def of_norm(self, norm: RMSNorm, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The MLP of norm(x + delta), which x becomes before the norm."""
        return self.down(self.gate_up.gated_of_norm(norm, x, delta))
