"""Attention kernels alone: decode of 64 requests at 4k against the memory, extend at 8k against bf16 products.

Other cuts of the work are tried beside the ones in use: what to look at first where a target is missed.
"""

from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.target import QWEN3_8B, TINY, Shape, Target
from engine.attention.backend import AttentionBackend
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.triton_decode import DecodeTiles, decode, decode_tiles, split_list
from engine.kernels.triton_extend import ExtendTiles, extend, extend_tiles
from engine.kv.kv_pool import CacheSpec, KVPool
from engine.kv.step_batch import StepBatch

PAGE_SIZE = 16
TOLERANCE = {"bfloat16": 4e-2, "float32": 1e-3}  # beside torch, on values up to 4 or so: one step of bf16 there


def decode_bandwidth(target: Target) -> dict[str, Any]:
    shape = target.pick(QWEN3_8B, TINY)
    batch, context = target.pick((64, 4096), (2, 40))
    pool, table = _pool(shape, batch=batch, context=context, target=target)
    q = torch.randn(batch, shape.heads, shape.head_dim, device=target.device).to(pool.k(0).dtype)
    kv_lens = torch.full((batch,), context, dtype=torch.int32, device=target.device)

    def run(tiles: DecodeTiles) -> float:
        splits = split_list(kv_lens, tiles=tiles)
        return target.ms(
            lambda: decode(
                q,
                pool.k(0),
                pool.v(0),
                page_table=table,
                kv_lens=kv_lens,
                splits=splits,
                tiles=tiles,
            )
        )

    size = 2 * batch * context * shape.kv_heads * shape.head_dim * 2
    used = decode_tiles(kv_heads=shape.kv_heads, dim=shape.head_dim, dtype=pool.k(0).dtype)
    rows = _tried(run, used, _other_decodes(used) if not target.small else [])
    for row in rows:
        row["gb_s"] = size / row["ms"] / 1e6
        row["of_copy"] = target.share(row["gb_s"], "copy_gb_s")
    return {"batch": batch, "context": context, "kv_bytes": size, **rows[0], "others": rows[1:]}


def extend_rate(target: Target) -> dict[str, Any]:
    shape = target.pick(QWEN3_8B, TINY)
    tokens = target.pick(8192, 40)
    pool, table = _pool(shape, batch=1, context=tokens, target=target)
    q = torch.randn(tokens, shape.heads, shape.head_dim, device=target.device).to(pool.k(0).dtype)
    starts, kv_lens = (torch.tensor(x, dtype=torch.int32, device=target.device) for x in ([0, tokens], [tokens]))

    def run(tiles: ExtendTiles) -> float:
        return target.ms(
            lambda: extend(
                q,
                pool.k(0),
                pool.v(0),
                page_table=table,
                starts=starts,
                kv_lens=kv_lens,
                most_rows=tokens,
                tiles=tiles,
            )
        )

    flop = 2 * tokens * tokens * shape.heads * shape.head_dim
    used = extend_tiles(dim=shape.head_dim, dtype=pool.k(0).dtype)
    rows = _tried(run, used, _other_extends(used) if not target.small else [])
    rows.append({"tiles": "torch, contiguous K and V", "ms": _torch_ms(target, shape, tokens)})
    for row in rows:
        row["tflop_s"] = flop / row["ms"] / 1e9
        row["of_bf16"] = target.share(row["tflop_s"], "bf16_tflop_s")
    return {"tokens": tokens, "flop": flop, **rows[0], "others": rows[1:]}


def numerics(target: Target) -> dict[str, Any]:
    """The compiled kernels beside torch: a prompt in two chunks, then single tokens; raises where they differ."""
    found: dict[str, Any] = {}
    for dtype in target.pick(("bfloat16", "float32"), ("float32",)):  # the interpreter multiplies no bf16
        for dim, kv_heads in target.pick(((128, 8), (64, 8), (256, 2)), ((16, 2),)):
            shape = Shape(1, 0, 0, 4 * kv_heads, kv_heads, dim, 0)
            error = _worst_error(target, shape, dtype)
            found[f"{dtype}, head_dim {dim}"] = error
            if not error < TOLERANCE[dtype]:
                raise AssertionError(f"{dtype}, head_dim {dim}: {error} beside torch, at most {TOLERANCE[dtype]}")
    return found


def _worst_error(target: Target, shape: Shape, dtype: str) -> float:
    lengths = target.pick([1, 37, 700, 4100], [1, 20])
    pools = [_pool(shape, batch=len(lengths), context=max(lengths) + 1, target=target, dtype=dtype) for _ in range(2)]
    table = pools[0][1]
    pools[1][0].buffer.copy_(pools[0][0].buffer)
    backends: list[AttentionBackend] = [TritonBackend(pools[0][0]), TorchBackend(pools[1][0])]
    worst = 0.0
    begins = [0 for _ in lengths]
    for ends in ([max(1, n // 3) for n in lengths], lengths, [n + 1 for n in lengths]):
        if any(end == begin for begin, end in zip(begins, ends, strict=True)):
            ends = [max(end, begin + 1) for begin, end in zip(begins, ends, strict=True)]
        step = _step(begins, ends, table, target.device)
        rows = sum(step.q_lens)
        q, k, v = (
            torch.randn(rows, heads, shape.head_dim, device=target.device).to(getattr(torch, dtype))
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        outs = []
        for backend in backends:
            backend.begin(step)
            outs.append(backend.attend(0, q, k, v).float())
        worst = max(worst, float((outs[0] - outs[1]).abs().max()))
        begins = ends
    return worst


def _step(begins: list[int], ends: list[int], table: torch.Tensor, device: torch.device) -> StepBatch:
    q_lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
    positions = torch.tensor([p for begin, end in zip(begins, ends, strict=True) for p in range(begin, end)])
    positions = positions.to(device)
    requests = torch.tensor([i for i, n in enumerate(q_lens) for _ in range(n)]).to(device)
    return StepBatch(
        extend=any(n > 1 for n in q_lens),
        q_lens=q_lens,
        kv_lens=ends,
        page_table=table,
        token_pages=table[requests, positions // PAGE_SIZE].to(torch.int64),
        token_offsets=positions % PAGE_SIZE,
    )


def _pool(shape: Shape, *, batch: int, context: int, target: Target, dtype: str = "") -> tuple[KVPool, torch.Tensor]:
    """One layer of random K and V, and a page table [batch, pages] whose pages are scattered."""
    pages = -(-context // PAGE_SIZE)
    dtype = dtype or target.dtype
    spec = CacheSpec(num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype)
    pool = KVPool([spec], num_pages=batch * pages, page_size=PAGE_SIZE, device=target.device)
    for cache in (pool.k(0), pool.v(0)):
        cache.normal_()
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)) + 1
    return pool, order.view(batch, pages).to(dtype=torch.int32, device=target.device)


def _tried(run: Any, used: Any, others: list[Any]) -> list[dict[str, Any]]:
    """A row each, the one in use first; one that does not fit this GPU says why."""
    rows = [{"tiles": asdict(used), "ms": run(used)}]
    for tiles in others:
        try:
            rows.append({"tiles": asdict(tiles), "ms": run(tiles)})
        except Exception as error:
            print(f"{tiles}: {error}", flush=True)
    return rows


def _other_decodes(used: DecodeTiles) -> list[DecodeTiles]:
    return [
        replace(used, stages=3, per_sm=4),
        replace(used, stages=3, per_sm=2),
        replace(used, per_sm=2),
        replace(used, min_split=128),
        replace(used, min_split=512),
        replace(used, min_split=1024),
        replace(used, block=32, stages=7, per_sm=4),
        replace(used, block=128, stages=3, warps=8, per_sm=2),
    ]


def _other_extends(used: ExtendTiles) -> list[ExtendTiles]:
    return [
        replace(used, stages=3),
        replace(used, block=128, stages=3),
        replace(used, rows=64, warps=4, stages=3),
        replace(used, rows=64, warps=4, stages=5),
        replace(used, block=32, stages=5),
    ]


def _torch_ms(target: Target, shape: Shape, tokens: int) -> float:
    q, k, v = (
        torch.randn(1, heads, tokens, shape.head_dim, device=target.device).bfloat16()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return target.ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
