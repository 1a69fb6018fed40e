# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Write K and V of new tokens into their pages, in one launch (GPU; never run on one yet)."""

import torch
import triton
import triton.language as tl


@triton.jit
def kv_write_kernel(
    k_ptr,  # [T, kv_heads, dim]; heads of a row are dense
    v_ptr,
    k_cache_ptr,  # page 0 of this layer's K
    v_cache_ptr,
    pages_ptr,  # [T] int64
    offsets_ptr,  # [T] int64
    k_stride,
    v_stride,
    page_stride,  # elements
    ROW: tl.constexpr,  # elements of a token
    TILE: tl.constexpr,
):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    mask = at < ROW
    target = tl.load(pages_ptr + token) * page_stride + tl.load(offsets_ptr + token) * ROW + at
    k = tl.load(k_ptr + token * k_stride + at, mask=mask)
    v = tl.load(v_ptr + token * v_stride + at, mask=mask)
    tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """k, v [T, kv_heads, dim], rows may lie apart; caches as KVPool.k; token t goes to (pages[t], offsets[t]), int64."""
    row = k.shape[1] * k.shape[2]
    assert k.stride()[1:] == v.stride()[1:] == (k.shape[2], 1), (k.stride(), v.stride())
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    kv_write_kernel[(len(k),)](
        k,
        v,
        k_cache,
        v_cache,
        pages,
        offsets,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        ROW=row,
        TILE=triton.next_power_of_2(row),
        num_warps=4,
    )
