"""What stands behind the last norm of models that have no logits of tokens."""

import torch

from engine.models.part import ModelPart


class NoHead:
    """Steps draw tokens that nothing reads: the frontend refuses to generate. `width`: tokens of the own vocabulary."""

    def __init__(self, width: int) -> None:
        self._width = width

    def in_float32(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(x), self._width, device=x.device) if out is None else out.zero_()


def label_matrix(part: ModelPart) -> torch.Tensor | None:
    """[labels, hidden] fp32 of a classifier; None: it is none."""
    count = len(part.config.head.labels)
    shape = [count, part.config.hidden_size]
    return part.checkpoint.take("score.weight", shape, dtype=torch.float32) if count else None
