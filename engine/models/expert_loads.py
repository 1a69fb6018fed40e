"""Metrics of load over experts and ranks."""

from collections.abc import Iterable

from engine.models.decoder import DenseDecoder


def expert_gauges(model: DenseDecoder) -> dict[str, float]:
    """Metrics by name, empty without experts; may include a running step."""
    mixtures, balance = model.mixtures().values(), model.balance
    if not mixtures:
        return {}
    found = {"expert_imbalance": _mean(_uneven(mixture.loads.tolist()) for mixture in mixtures)}
    if balance is None:
        return found
    return found | {
        "expert_rank_imbalance": _mean(balance.imbalances()),
        "expert_rank_imbalance_before": balance.before,
        "expert_rank_imbalance_after": balance.after,
        "expert_rebalances": float(balance.rounds),
        "expert_moved_layers": float(balance.moved_layers),
        "expert_failed_layers": float(balance.failed_layers),
    }


def expert_loads(model: DenseDecoder) -> list[list[int]]:
    """Tokens per expert by layer, zeros for other layers."""
    mixtures = model.mixtures()
    if not mixtures:
        return []
    count = len(next(iter(mixtures.values())).loads)
    return [mixtures[layer].loads.tolist() if layer in mixtures else [0] * count for layer in range(model.num_layers)]


def _uneven(loads: list[int]) -> float:
    return max(loads) * len(loads) / total if (total := sum(loads)) else 1.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 1.0
