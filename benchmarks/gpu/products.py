"""A decode step's products one by one: how much of the memory's rate each reaches at small batches, where it reads its weight.

What to look at first where a decode step is far over its floor: attention and these are nearly all of its bytes.
"""

from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.target import QWEN3_8B, TINY, Target


def measure(target: Target) -> dict[str, Any]:
    shape = target.pick(QWEN3_8B, TINY)
    wide = shape.head_dim * shape.heads
    matrices = {
        "qkv": (wide + 2 * shape.head_dim * shape.kv_heads, shape.hidden),
        "out": (shape.hidden, wide),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocab, shape.hidden),
    }
    rows = []
    for name, (outs, ins) in matrices.items():
        weight = torch.randn(outs, ins, device=target.device).bfloat16()
        rows += [_row(target, name, weight, batch) for batch in target.pick((1, 8, 64, 128), (1, 2))]
    return {"rows": rows}


def _row(target: Target, name: str, weight: torch.Tensor, batch: int) -> dict[str, Any]:
    x = torch.randn(batch, weight.shape[1], device=target.device).bfloat16()
    ms = target.ms(lambda: functional.linear(x, weight))
    rate = 2 * (weight.numel() + x.numel() + batch * len(weight)) / ms / 1e6
    return {"matrix": name, "batch": batch, "ms": ms, "gb_s": rate, "of_copy": target.share(rate, "copy_gb_s")}
