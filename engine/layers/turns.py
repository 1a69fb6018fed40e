"""RoPE tables of a stage, also for layers without RoPE."""

from dataclasses import replace

import torch

from engine.layers.rope import Rope, Turn
from engine.model_files.model_config import ModelConfig


class _NoRope:
    def __init__(self, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._one = torch.ones((1, 1, dim), dtype=dtype, device=device)
        self._zero = torch.zeros_like(self._one)

    def at(self, positions: torch.Tensor) -> Turn:
        shape = (len(positions), -1, -1)
        return self._one.expand(shape).contiguous(), self._zero.expand(shape).contiguous()

    def of_dimensions(self, positions: torch.Tensor, dimensions: torch.Tensor) -> Turn:
        return self.at(positions[0])


class LayerTurns:
    """One table per kind of RoPE; `way_of[n]`: the kind of the stage's layer n."""

    def __init__(self, config: ModelConfig, layers: range, *, dtype: torch.dtype, device: torch.device) -> None:
        ropes = [config.rope_of(layer) for layer in layers]
        ways = list(dict.fromkeys(ropes))
        self.way_of = [ways.index(rope) for rope in ropes]
        self._ways = [
            _NoRope(config.head_dim, dtype=dtype, device=device)
            if rope is None
            else Rope(replace(config, rope=rope), dtype=dtype, device=device)
            for rope in ways
        ]
        self._dimensions = _dimensions(config).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(cos, signed sin) of each kind for `positions` [T] i64, or [3, T] (M-RoPE)."""
        if positions.dim() == 2:
            return tuple(x for way in self._ways for x in way.of_dimensions(positions, self._dimensions))
        return tuple(x for way in self._ways for x in way.at(positions))


def _dimensions(config: ModelConfig) -> torch.Tensor:
    half = torch.zeros(config.head_dim // 2, dtype=torch.int64)
    if config.vision is not None and config.vision.mrope is not None:
        pairs = torch.tensor(config.vision.mrope.dimensions())
        half[: len(pairs)] = pairs
    return torch.cat((half, half))
