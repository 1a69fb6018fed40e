"""Attention softmax options of a layer, for all backends."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Softmax:
    """softmax(s), s = scale * q.k, or cap * tanh(scale * q.k / cap) with a `cap` (Gemma 2).

    `sinks` float32[query heads]: a score per head without a value (arXiv:2309.17453, gpt-oss).
    """

    scale: float
    cap: float = 0.0
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        sinks = self.sinks
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), sinks

    @property
    def is_plain(self) -> bool:
        """Only the scale is set."""
        return not self.cap and self.sinks is None


def plain_softmax(head_dim: int) -> Softmax:
    return Softmax(head_dim**-0.5)
