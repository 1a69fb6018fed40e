"""Attention's kernels and products alone: decode steps against the memory's rate, prompts against bf16 products; by the tiles in use and by others.

Pages lie as far apart as in a worker's pool, which holds all layers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.numerics import Case, make_pool, make_step
from benchmarks.gpu.products import product_rows
from benchmarks.gpu.target import QWEN3_8B, TABLE, TINY, Shape, Target
from engine.attention import triton_backend
from engine.attention.backend import make_attention_backend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.paged_attention import Softmax
from service.flags import ConfigError

TILES = TABLE["tiles"]
NO_CHANGE: Mapping[str, int] = {}
Work = tuple[int, int, int]  # requests, new tokens of each, tokens after the step


def tiles(target: Target) -> dict[str, Any]:
    """A row for each shape: its time by the tiles in use, as a share of what bounds it, and the best others."""
    found: dict[str, Any] = {"rows": []}
    for work in target.pick(TILES["works"], ((2, 1, 40), (1, 20, 40))):
        found["rows"].append(_row(target, tuple(work)))
        target.keep(found)
    found["products"] = product_rows(target)
    target.keep(found)
    found["libraries"] = _library_rows(target, *target.pick((QWEN3_8B, 8192), (TINY, 40)))
    return found


def candidates(target: Target, kind: str) -> list[dict[str, int]]:
    """Return what each differs in from the tiles in use; {}: in nothing."""
    return [{}, *target.pick(TILES[kind], [])]


def _row(target: Target, work: Work) -> dict[str, Any]:
    shape = target.pick(QWEN3_8B, TINY)
    batch, rows, context = work
    kind = "decode" if rows == 1 else "extend"
    used, *others = candidates(target, kind)
    used_ms = attention_ms(target, shape, work, kind, used)
    tried, failed = [{"tiles": used, "ms": used_ms}], list[dict[str, Any]]()
    for change in others:
        try:
            tried.append({"tiles": change, "ms": attention_ms(target, shape, work, kind, change)})
        except Exception as error:  # tiles that do not fit this GPU
            failed.append({"tiles": change, "error": f"{type(error).__name__}: {error}"[:200]})
    best = min(tried, key=lambda row: row["ms"])
    row = {"work": f"{batch} x {rows} at {context}", **_shares(target, shape, work, used_ms)}
    return row | {"best": best, "tried": tried, "failed": failed}


def _shares(target: Target, shape: Shape, work: Work, ms: float) -> dict[str, Any]:
    batch, rows, context = work
    gb_s = 4 * batch * context * shape.kv_heads * shape.head_dim / ms / 1e6
    pairs = batch * rows * (context - (rows - 1) / 2)
    tflop_s = 4 * pairs * shape.heads * shape.head_dim / ms / 1e9
    of_copy, of_bf16 = target.share(gb_s, "copy_gb_s"), target.share(tflop_s, "bf16_tflop_s")
    of_bound = None if of_copy is None or of_bf16 is None else max(of_copy, of_bf16)
    return {"ms": ms, "gb_s": gb_s, "tflop_s": tflop_s, "of_copy": of_copy, "of_bf16": of_bf16, "of_bound": of_bound}


def attention_ms(
    target: Target,
    shape: Shape,
    work: Work,
    kind: str = "extend",
    change: Mapping[str, int] = NO_CHANGE,
    *,
    backend: str = "triton",
) -> float:
    """Time one layer of a step."""
    batch, rows, context = work
    case = Case(shape.heads, shape.kv_heads, shape.head_dim, dtype=target.dtype)
    pool, table = make_pool(case, target, batch=batch, context=context, layers=target.pick(shape.layers, 1))
    with _tiles(kind, change):
        made = make_attention_backend(backend, pool, num_heads=shape.heads)
    assert isinstance(made, TritonBackend)
    made.begin(make_step([context - rows] * batch, [context] * batch, table))
    q = torch.randn(batch * rows, shape.heads, shape.head_dim, device=target.device).to(pool.k(0).dtype)
    softmax = Softmax(shape.head_dim**-0.5)
    return target.ms(lambda: made.attend_written(0, q, softmax))


@contextmanager
def _tiles(kind: str, change: Mapping[str, int]) -> Iterator[None]:
    """Backends that are made within take tiles that differ so."""
    name = f"{kind}_tiles"
    used = getattr(triton_backend, name)
    setattr(triton_backend, name, lambda **of: replace(used(**of), **change))
    try:
        yield
    finally:
        setattr(triton_backend, name, used)


def _library_rows(target: Target, shape: Shape, tokens: int) -> list[dict[str, Any]]:
    """Time torch's own attention over contiguous K and V: as it chooses, and cuDNN's; and FlashInfer's over pages."""
    q, k, v = (torch.randn(1, shape.heads, tokens, shape.head_dim, device=target.device).bfloat16() for _ in range(3))
    ways = {"torch": nullcontext(), "cuDNN": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}
    rows: list[dict[str, Any]] = []
    for name in target.pick(("torch", "cuDNN", "flashinfer"), ("torch", "flashinfer")):
        row: dict[str, Any] = {"library": name}
        try:
            if name in ways:
                with ways[name]:
                    ms = target.ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
            else:
                ms = attention_ms(target, shape, (1, tokens, tokens), backend=name)
            row |= _shares(target, shape, (1, tokens, tokens), ms)
        except (RuntimeError, ConfigError) as error:
            row["error"] = str(error)[:200]
        rows.append(row)
    return rows
