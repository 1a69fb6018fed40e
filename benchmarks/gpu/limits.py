"""What this GPU gives at best: bytes copied within its memory, and bf16 products."""

from typing import Any

import torch

from benchmarks.gpu.target import Target


def measure(target: Target) -> dict[str, Any]:
    size = target.pick(8 << 30, 1 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=target.device)
    goal = torch.zeros_like(source)
    copy_ms = target.ms(lambda: goal.copy_(source), flush=False)
    edge = target.pick(8192, 64)
    # random: the same product of zeros runs faster (it draws less power)
    a, b = (torch.randn(edge, edge, device=target.device).bfloat16() for _ in range(2))
    product_ms = target.ms(lambda: a @ b)
    return {
        "copy_gb_s": 2 * size / copy_ms / 1e6,
        "bf16_tflop_s": 2 * edge**3 / product_ms / 1e9,
        "copy_bytes": size,
        "product_edge": edge,
    }
