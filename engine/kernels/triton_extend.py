# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Attention of many new tokens over pages that already hold the prefix and the new tokens themselves, for GPUs.

FlashAttention-2's loop (Dao 2023) with K and V fetched through the page table. A row's result depends on its position
and the cache alone, not on how the prompt was cut into chunks beyond rounding.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton_decode import tile_dim

NUM_STAGES = 2


@triton.jit
def extend_kernel(
    q_ptr,  # [T, heads, dim] dense
    k_ptr,  # page 0 of this layer's K; rows of a token are dense
    v_ptr,
    out_ptr,  # as q
    table_ptr,  # [B, table_stride] int32
    starts_ptr,  # [B + 1] int32: first row of each request in q
    kv_lens_ptr,  # [B] int32
    table_stride,
    page_stride,  # elements; page * page_stride exceeds 32 bits
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of rows, head, request)."""
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + request)
    q_len = tl.load(starts_ptr + request + 1) - first
    if tile * BLOCK_ROWS < q_len:
        kv_len = tl.load(kv_lens_ptr + request)
        kv_head = head // (HEADS // KV_HEADS)
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, TILE_DIM)
        mask_m = rows < q_len
        mask_d = dims < DIM
        mask_md = mask_m[:, None] & mask_d[None, :]
        at_q = ((first + rows).to(tl.int64) * HEADS + head) * DIM
        q = tl.load(q_ptr + at_q[:, None] + dims[None, :], mask=mask_md, other=0.0)
        position = kv_len - q_len + rows
        end = tl.minimum(kv_len, kv_len - q_len + (tile + 1) * BLOCK_ROWS)
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, TILE_DIM], tl.float32)
        table = table_ptr + request.to(tl.int64) * table_stride
        for at in range(0, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            mask_n = token < end
            page = tl.load(table + token // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)
            start = page * page_stride + ((token % PAGE_SIZE) * KV_HEADS + kv_head) * DIM
            k = tl.load(k_ptr + start[None, :] + dims[:, None], mask=mask_n[None, :] & mask_d[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
            # rows past the end see what the last row sees: no row is empty, no NaN arises
            seen = (token[None, :] <= position[:, None]) & mask_n[None, :]
            scores = tl.where(seen, scores, float("-inf"))
            best_now = tl.maximum(best, tl.max(scores, 1))
            factor = tl.exp(best - best_now)
            weights = tl.exp(scores - best_now[:, None])
            v = tl.load(v_ptr + start[:, None] + dims[None, :], mask=mask_n[:, None] & mask_d[None, :], other=0.0)
            acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            total = total * factor + tl.sum(weights, 1)
            best = best_now
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_q[:, None] + dims[None, :], out, mask=mask_md)


def extend_constants(
    *, heads: int, kv_heads: int, dim: int, page_size: int, precision: str, block_rows: int, block: int
) -> dict[str, Any]:
    """Compile-time constants."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAGE_SIZE": page_size,
        "TILE_DIM": tile_dim(dim),
        "BLOCK_ROWS": block_rows,
        "BLOCK": block,
        "PRECISION": precision,
    }


def tile_shape(dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(rows, tokens, warps) of a tile: what fits the registers of sm_90 without spills (tests compile it)."""
    if dtype == torch.float32:  # no tensor cores for exact fp32: small tiles
        return 16, (32 if dim <= 128 else 16), 8
    if dim > 128:
        return 64, 64, 8
    return 128, 64, 8 if dim > 64 else 4


def extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    starts: torch.Tensor,
    kv_lens: torch.Tensor,
    most_rows: int,
    scale: float,
) -> torch.Tensor:
    """[T, heads, dim]. q [T, heads, dim] dense; caches as KVPool.k; page_table [B, pages] int32; starts [B + 1] int32.

    `most_rows`: an upper bound of the requests' q_len, known to the host.
    """
    heads, dim = q.shape[1:]
    page_size, kv_heads = k_cache.shape[1:3]
    block_rows, block, warps = tile_shape(dim, k_cache.dtype)
    out = torch.empty_like(q)
    precision = "ieee" if k_cache.dtype == torch.float32 else "tf32"
    extend_kernel[(triton.cdiv(most_rows, block_rows), heads, len(kv_lens))](
        q,
        k_cache,
        v_cache,
        out,
        page_table,
        starts,
        kv_lens,
        page_table.stride(0),
        k_cache.stride(0),
        scale,
        **extend_constants(
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            page_size=page_size,
            precision=precision,
            block_rows=block_rows,
            block=block,
        ),
        num_warps=warps,
        num_stages=NUM_STAGES,
    )
    return out
