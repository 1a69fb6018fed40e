# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Attention of many new tokens over pages that already hold their K and V, for GPUs (never run on one yet).

FlashAttention-2's loop (Dao 2023) with K and V fetched through the page table: first the tokens that every row of a tile
sees, without a mask, then the few at its diagonal. Apart from rounding, chunks do not change a row's result.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton_decode import LOG2_E, cache_constants


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    """A program's share: `rows` of one head against `block` tokens at a time."""

    rows: int
    block: int
    warps: int
    stages: int


@cache
def extend_tiles(*, dim: int, dtype: torch.dtype) -> ExtendTiles:
    """Fits the registers and the shared memory of sm_90 without spills (tests compile it)."""
    if dtype == torch.float32:  # no tensor cores for exact fp32: small tiles
        return ExtendTiles(rows=16, block=32 if dim <= 128 else 16, warps=8, stages=2)
    if dim > 128:
        return ExtendTiles(rows=64, block=64, warps=8, stages=2)
    return ExtendTiles(rows=128, block=64, warps=8 if dim > 64 else 4, stages=5)  # 5: two blocks ahead, see DecodeTiles


@triton.jit
def extend_block(
    q,
    best,
    total,
    acc,
    at,
    end,
    position,  # of each row
    table,
    k_ptr,
    v_ptr,
    page_stride,
    kv_head,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,  # some row does not see some token of this block
):
    """Tokens at..at + BLOCK: (best, total, acc) with them."""
    dims = tl.arange(0, TILE_DIM)
    token = at + tl.arange(0, BLOCK)
    if MASKED:
        mask_n = token < end
        page = tl.load(table + token // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)
    else:
        page = tl.load(table + token // PAGE_SIZE).to(tl.int64)
    start = page * page_stride + ((token % PAGE_SIZE) * KV_HEADS + kv_head) * DIM
    at_k = k_ptr + start[None, :] + dims[:, None]
    at_v = v_ptr + start[:, None] + dims[None, :]
    if MASKED:
        k = tl.load(at_k, mask=mask_n[None, :] & (dims < DIM)[:, None], other=0.0)
    elif TILE_DIM == DIM:
        k = tl.load(at_k)
    else:
        k = tl.load(at_k, mask=(dims < DIM)[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if MASKED:
        # rows past the end see what the last row sees: no row is empty, no NaN arises
        seen = (token[None, :] <= position[:, None]) & mask_n[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    best_now = tl.maximum(best, tl.max(scores, 1))
    factor = tl.exp2(best - best_now)
    weights = tl.exp2(scores - best_now[:, None])
    if MASKED:
        v = tl.load(at_v, mask=mask_n[:, None] & (dims < DIM)[None, :], other=0.0)
    elif TILE_DIM == DIM:
        v = tl.load(at_v)
    else:
        v = tl.load(at_v, mask=(dims < DIM)[None, :], other=0.0)
    acc = acc * factor[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return best_now, total * factor + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["table_stride"])
def extend_kernel(
    q_ptr,  # [T, heads, dim]; heads of a row are dense
    k_ptr,  # page 0 of this layer's K; rows of a token are dense
    v_ptr,
    out_ptr,  # [T, heads, dim] dense
    table_ptr,  # [slots, table_stride] int32
    slots_ptr,  # [B] int64
    starts_ptr,  # [B + 1] int32: first row of each request in q
    kv_lens_ptr,  # [B] int32
    q_stride,
    table_stride,
    page_stride,  # elements; page * page_stride exceeds 32 bits
    scale,  # times log2(e)
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of rows, head, request); the last rows, which see most, begin first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, request = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + request)
    q_len = tl.load(starts_ptr + request + 1) - first
    if tile * BLOCK_ROWS < q_len:
        kv_len = tl.load(kv_lens_ptr + request)
        kv_head = head // (HEADS // KV_HEADS)
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, TILE_DIM)
        mask_md = (rows < q_len)[:, None] & (dims < DIM)[None, :]
        in_batch = (first + rows).to(tl.int64)
        at_q = q_ptr + in_batch[:, None] * q_stride + head * DIM + dims[None, :]
        q = tl.load(at_q, mask=mask_md, other=0.0)
        position = kv_len - q_len + rows
        prefix = kv_len - q_len + tile * BLOCK_ROWS  # tokens before the first row
        end = tl.minimum(kv_len, prefix + BLOCK_ROWS)
        seen_by_all = (prefix + 1) // BLOCK * BLOCK
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, TILE_DIM], tl.float32)
        table = table_ptr + tl.load(slots_ptr + request) * table_stride
        for at in range(0, seen_by_all, BLOCK):
            best, total, acc = extend_block(
                q, best, total, acc, at, end, position, table, k_ptr, v_ptr, page_stride, kv_head, scale,
                KV_HEADS, DIM, PAGE_SIZE, TILE_DIM, BLOCK, PRECISION, False,
            )  # fmt: skip
        for at in range(seen_by_all, end, BLOCK):
            best, total, acc = extend_block(
                q, best, total, acc, at, end, position, table, k_ptr, v_ptr, page_stride, kv_head, scale,
                KV_HEADS, DIM, PAGE_SIZE, TILE_DIM, BLOCK, PRECISION, True,
            )  # fmt: skip
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        at_out = (in_batch * HEADS + head) * DIM
        tl.store(out_ptr + at_out[:, None] + dims[None, :], out, mask=mask_md)


def extend_constants(cache: dict[str, Any], tiles: ExtendTiles) -> dict[str, Any]:
    return {**cache, "BLOCK_ROWS": tiles.rows, "BLOCK": tiles.block}


def extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    kv_lens: torch.Tensor,
    most_rows: int,
    tiles: ExtendTiles,
) -> torch.Tensor:
    """[T, heads, dim] dense. q [T, heads, dim] in the caches' dtype, rows may lie apart; caches as KVPool.k; page_table
    [slots, pages] int32; slots [B] int64; starts [B + 1] int32; `most_rows`: an upper bound of the requests' q_len, known to the host.
    """
    (_, heads, dim), (_, page_size, kv_heads, _) = q.shape, k_cache.shape
    cache = cache_constants(heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, dtype=k_cache.dtype)
    out = torch.empty(tuple(q.shape), dtype=q.dtype, device=q.device)
    extend_kernel[(triton.cdiv(most_rows, tiles.rows), heads, len(kv_lens))](
        q,
        k_cache,
        v_cache,
        out,
        page_table,
        slots,
        starts,
        kv_lens,
        q.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        dim**-0.5 * LOG2_E,
        **extend_constants(cache, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
