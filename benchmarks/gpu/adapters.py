"""Decode steps with LoRA adapters beside the same steps without: as graphs, at rank 16."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.engine import STD, Steps, make_engine, random_model
from benchmarks.gpu.steps import step_ms
from benchmarks.gpu.target import QWEN3_8B, TINY, Target
from engine.layers.linear import SiteShape
from engine.lora.weights import AdapterWeights, SiteWeights
from engine.models.decoder import DenseDecoder

RANK = 16
CONTEXT = 512


def measure(target: Target) -> dict[str, Any]:
    """All rows of a batch have an adapter; `adapters`: how many there are among them."""
    shape = target.pick(QWEN3_8B, TINY)
    batch, counts = target.pick((64, (0, 1, 8)), (2, (0, 2)))
    context = target.pick(CONTEXT, 20)
    models: list[DenseDecoder] = []

    def load(*args: Any, **kwargs: Any) -> DenseDecoder:
        models.append(random_model(*args, **kwargs))
        return models[-1]

    parts = make_engine(
        target,
        shape,
        context=context + 16,
        load=load,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras_per_batch=max(counts),
        max_running_requests=batch,
        max_total_tokens=batch * (context + 32),
    )
    store = parts.device.adapters
    assert store is not None
    sites = [site.shape for site in models[0].linear_sites()]
    for number in range(1, max(counts) + 1):
        store.install(number, random_adapter(sites, dtype=getattr(torch, target.dtype), device=target.device))
    rows = []
    for count in counts:
        adapters = [1 + slot % count if count else 0 for slot in range(batch)]
        steps = Steps(parts, batch=batch, context=context, adapters=adapters)
        rows.append({"batch": batch, "adapters": count, "ms": step_ms(target, parts, steps)})
        rows[-1]["of_plain"] = rows[-1]["ms"] / rows[0]["ms"]
    parts.device.executor.close()
    return {"rank": RANK, "context": context, "rows": rows}


def random_adapter(sites: Sequence[SiteShape], *, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    """Make an adapter that changes every matrix of `sites`."""

    def weights(*shape: int) -> Tensor:
        return STD * torch.randn(shape, device=device).to(dtype)

    made = []
    for site in sites:
        parts, column = [], 0
        for i, size in enumerate(site.rows):
            ranks = slice(i * RANK, (i + 1) * RANK)
            parts.append((slice(column, column + size), ranks, weights(RANK, size)))
            column += size
        made.append(SiteWeights(weights(len(parts) * RANK, site.width), tuple(parts)))
    return AdapterWeights(tuple(made), RANK)
