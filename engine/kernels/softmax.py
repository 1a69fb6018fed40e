"""How a layer's attention scores become weights, for every backend."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Softmax:
    """weights = softmax(s) with s = scale * q.k, or cap * tanh(scale * q.k / cap) where `cap` is not 0 (Gemma 2).

    `sinks` [query heads] fp32: a score of each head that takes weight and adds no value (arXiv:2309.17453, gpt-oss).
    """

    scale: float
    cap: float = 0.0
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        sinks = self.sinks
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), sinks

    @property
    def is_plain(self) -> bool:
        """Whether the scale alone matters: what every kernel has."""
        return not self.cap and self.sinks is None


def plain_softmax(head_dim: int) -> Softmax:
    return Softmax(head_dim**-0.5)
