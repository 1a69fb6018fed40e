"""What this GPU gives at best: bytes copied within its memory, and bf16 products."""

from typing import Any

import torch

from benchmarks.gpu.target import Target


def measure(target: Target) -> dict[str, Any]:
    size = target.pick(8 << 30, 1 << 20)
    # random: zeros cost less power, and a memory may compress them
    source = torch.empty(size // 8, dtype=torch.int64, device=target.device).random_()
    goal = torch.empty_like(source)
    copy_ms = target.ms(lambda: goal.copy_(source), flush=False)
    edge = target.pick(8192, 64)
    a, b = (torch.randn(edge, edge, device=target.device).bfloat16() for _ in range(2))
    product_ms = target.ms(lambda: a @ b)
    return {
        "copy_gb_s": 2 * size / copy_ms / 1e6,
        "bf16_tflop_s": 2 * edge**3 / product_ms / 1e9,
        "copy_bytes": size,
        "product_edge": edge,
    }
