# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Paged decode attention for GPUs, in two stages: partial softmax over splits of a request's tokens, then a merge.

Split-KV decode is Flash-Decoding (Dao et al. 2023); one tile holds all query heads of a kv head, so K and V are read
once. How a request is split depends on its length alone: its result is the same in any batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64  # longer requests get longer splits
BLOCK_N = 64
MIN_TILE_HEADS = 16  # what tl.dot takes at least
NUM_STAGES = 3


@triton.jit
def split_tokens(kv_len, MIN_SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of each split of a request: a multiple of BLOCK."""
    per_split = tl.cdiv(tl.cdiv(kv_len, SPLITS), BLOCK) * BLOCK
    return tl.maximum(per_split, MIN_SPLIT)


@triton.jit
def decode_split_kernel(
    q_ptr,  # [B, heads, dim] dense
    k_ptr,  # page 0 of this layer's K; rows of a token are dense
    v_ptr,
    part_ptr,  # [B, heads, splits, dim] fp32: normalised output of each split
    lse_ptr,  # [B, heads, splits] fp32: log of each split's sum of weights
    table_ptr,  # [B, table_stride] int32
    kv_lens_ptr,  # [B] int32
    table_stride,
    page_stride,  # elements; page * page_stride exceeds 32 bits
    num_splits,  # of the grid: as many as the longest request needs
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (request, kv head, split)."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens_ptr + request)
    per_split = split_tokens(kv_len, MIN_SPLIT, SPLITS, BLOCK)
    begin = split * per_split
    end = tl.minimum(begin + per_split, kv_len)
    if begin < end:
        GROUP: tl.constexpr = HEADS // KV_HEADS
        in_group = tl.arange(0, TILE_HEADS)
        dims = tl.arange(0, TILE_DIM)
        head = kv_head * GROUP + in_group
        row = request.to(tl.int64) * HEADS + head
        mask_h = in_group < GROUP
        mask_d = dims < DIM
        mask_hd = mask_h[:, None] & mask_d[None, :]
        q = tl.load(q_ptr + row[:, None] * DIM + dims[None, :], mask=mask_hd, other=0.0)
        best = tl.full([TILE_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_HEADS], tl.float32)
        acc = tl.zeros([TILE_HEADS, TILE_DIM], tl.float32)
        table = table_ptr + request.to(tl.int64) * table_stride
        for at in range(begin, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            mask_n = token < end
            page = tl.load(table + token // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)
            start = page * page_stride + ((token % PAGE_SIZE) * KV_HEADS + kv_head) * DIM
            k = tl.load(k_ptr + start[None, :] + dims[:, None], mask=mask_n[None, :] & mask_d[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
            scores = tl.where(mask_n[None, :], scores, float("-inf"))
            best_now = tl.maximum(best, tl.max(scores, 1))
            factor = tl.exp(best - best_now)
            weights = tl.exp(scores - best_now[:, None])
            v = tl.load(v_ptr + start[:, None] + dims[None, :], mask=mask_n[:, None] & mask_d[None, :], other=0.0)
            acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            total = total * factor + tl.sum(weights, 1)
            best = best_now
        part = row * num_splits + split
        tl.store(part_ptr + part[:, None] * DIM + dims[None, :], acc / total[:, None], mask=mask_hd)
        tl.store(lse_ptr + part, best + tl.log(total), mask=mask_h)


@triton.jit
def decode_merge_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,  # [B, heads, dim] dense
    kv_lens_ptr,
    num_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (request, head): the parts, weighed by their sums, in order."""
    request, head = tl.program_id(0), tl.program_id(1)
    kv_len = tl.load(kv_lens_ptr + request)
    used = tl.cdiv(kv_len, split_tokens(kv_len, MIN_SPLIT, SPLITS, BLOCK))
    row = request.to(tl.int64) * HEADS + head
    dims = tl.arange(0, TILE_DIM)
    mask = dims < DIM
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([TILE_DIM], tl.float32)
    for split in range(0, used):
        lse = tl.load(lse_ptr + row * num_splits + split)
        part = tl.load(part_ptr + (row * num_splits + split) * DIM + dims, mask=mask, other=0.0)
        best_now = tl.maximum(best, lse)
        factor = tl.exp(best - best_now)
        weight = tl.exp(lse - best_now)
        acc = acc * factor + part * weight
        total = total * factor + weight
        best = best_now
    tl.store(out_ptr + row * DIM + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=mask)


def split_constants(*, heads: int, kv_heads: int, dim: int, page_size: int, precision: str) -> dict[str, Any]:
    """Compile-time constants of the first stage."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAGE_SIZE": page_size,
        "TILE_HEADS": max(MIN_TILE_HEADS, triton.next_power_of_2(heads // kv_heads)),
        "TILE_DIM": tile_dim(dim),
        "PRECISION": precision,
        **_split_rule(),
    }


def merge_constants(*, heads: int, dim: int) -> dict[str, Any]:
    """Compile-time constants of the second stage."""
    return {"HEADS": heads, "DIM": dim, "TILE_DIM": tile_dim(dim), **_split_rule()}


def tile_dim(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def num_warps(dim: int, dtype: torch.dtype) -> int:
    """Warps of the first stage: what keeps its accumulators in registers on sm_90 (tests compile it)."""
    return 8 if dtype == torch.float32 and dim > 128 else 4


def _split_rule() -> dict[str, int]:
    return {"BLOCK": BLOCK_N, "MIN_SPLIT": MIN_SPLIT_TOKENS, "SPLITS": MAX_SPLITS}


def splits_needed(longest: int) -> int:
    """Splits of the grid for a batch whose longest request has `longest` tokens."""
    return min(MAX_SPLITS, -(-longest // MIN_SPLIT_TOKENS))


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """[B, heads, dim]. q [B, heads, dim] dense; caches as KVPool.k; page_table [B, pages] int32; kv_lens [B] int32.

    `longest`: an upper bound of kv_lens, known to the host.
    """
    batch, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    splits = splits_needed(longest)
    parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    precision = "ieee" if k_cache.dtype == torch.float32 else "tf32"
    decode_split_kernel[(batch, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        parts,
        lse,
        page_table,
        kv_lens,
        page_table.stride(0),
        k_cache.stride(0),
        splits,
        scale,
        **split_constants(heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, precision=precision),
        num_warps=num_warps(dim, k_cache.dtype),
        num_stages=NUM_STAGES,
    )
    decode_merge_kernel[(batch, heads)](
        parts, lse, out, kv_lens, splits, **merge_constants(heads=heads, dim=dim), num_warps=2
    )
    return out
