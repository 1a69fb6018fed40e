"""Expert choice and weights."""

import torch
from torch import Tensor

from engine.layers.linear import sums_matrix
from engine.model_files.experts_config import ExpertsConfig


class ExpertRouter:
    """Chooses the experts of each token.

    `weight` [experts, hidden]; `bias` [experts] fp32, only for the choice. Scores are fp32,
    unrounded. Ties go to the lower expert.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, config: ExpertsConfig, *, logit_bias: Tensor | None = None
    ) -> None:
        self._matrix = sums_matrix(weight, logit_bias, segments=1)
        self._bias = bias
        self._config = config

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [T, per_token] i64, best first, and their weights fp32, for x [T, hidden]."""
        config, logits = self._config, self._matrix.partial(x)
        scores = logits.sigmoid() if config.sigmoid else logits.softmax(-1)
        chosen = self._choose(scores)
        weights = scores.gather(1, chosen)
        if config.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if config.sigmoid else 0.0))
        return chosen, weights * config.scaling

    def _choose(self, scores: Tensor) -> Tensor:
        config = self._config
        if self._bias is not None:
            scores = scores + self._bias
        if config.groups > 1:
            scores = _in_best_groups(scores, config)
        return _best(scores, config.per_token)


def _in_best_groups(scores: Tensor, config: ExpertsConfig) -> Tensor:
    """Scores of the chosen groups, -inf elsewhere.

    DeepSeek-V2 (arXiv:2405.04434) compares groups by the best expert, V3 (arXiv:2412.19437) by two.
    """
    grouped = scores.view(len(scores), config.groups, scores.shape[1] // config.groups)
    best = _best(grouped.topk(config.group_best, dim=-1).values.sum(-1), config.chosen_groups)
    kept = torch.zeros(best.shape[0], config.groups, dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).view_as(scores)


def _best(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
