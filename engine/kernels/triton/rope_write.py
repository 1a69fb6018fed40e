# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Norm and rotary embedding of new q and k, and writes of K and V: one GPU launch per layer.

Operations of elementwise.c, rounded like torch's operators in engine/layers.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.fp8 import codes_of, exponents_of, magnitude
from engine.kv.kv_pool import ONE_UNIT, Units

HEAD_TILE = 8  # heads per program: enough programs for one token


@triton.jit
def pairs(ptr, mask, HALF: tl.constexpr):
    """Both elements of pairs, which lie HALF apart, as fp32."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32), tl.load(ptr + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(ptr, low, high, mask, HALF: tl.constexpr):
    tl.store(ptr, low.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + HALF, high.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def turned(low, high, cosine_ptr, sine_ptr, mask, dtype: tl.constexpr, HALF: tl.constexpr):
    """Rotated pairs of fp32, in `dtype`."""
    low_cosine, high_cosine = pairs(cosine_ptr, mask, HALF)
    low_sine, high_sine = pairs(sine_ptr, mask, HALF)
    new_low = ((low * low_cosine).to(dtype).to(tl.float32) + high * low_sine).to(dtype)
    new_high = ((high * high_cosine).to(dtype).to(tl.float32) + low * high_sine).to(dtype)
    return new_low, new_high


@triton.jit
def _store_heads(to_ptr, exponents_ptr, low, high, mask, HALF: tl.constexpr):
    """Store pairs [heads, TILE], 0 beyond `mask`, as what the cache keeps.

    `exponents_ptr` [heads, 1]: where exponents go, if those are codes.
    """
    if to_ptr.dtype.element_ty == tl.uint8:
        largest = tl.max(tl.maximum(magnitude(low), magnitude(high)), 1, keep_dims=True)
        is_head = tl.max(mask.to(tl.int32), 1, keep_dims=True) > 0
        tl.store(exponents_ptr, exponents_of(largest).to(tl.uint8), mask=is_head)
        low, high = codes_of(low, largest), codes_of(high, largest)
    store_pairs(to_ptr, low, high, mask, HALF)


@triton.jit
def rope_write_kernel(
    x_ptr,  # [T, x_stride]: dense heads of q, k and v; q is changed
    weight_ptr,  # [HEADS + KV_HEADS, DIM]
    cosine_ptr,  # [T, turn_stride]
    sine_ptr,
    k_cache_ptr,  # unit 0 of page 0 of this layer's K; a token's heads are dense in a unit
    v_cache_ptr,
    pages_ptr,  # [T] int64
    offsets_ptr,  # [T] int64
    x_stride,
    turn_stride,
    page_stride,  # elements
    unit_stride,
    eps,
    offset,  # added to the weight
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORMS: tl.constexpr,
    TILE: tl.constexpr,  # half a head
    TILE_HEADS: tl.constexpr,
):
    """Program (token, tile of heads): first q's tiles, then k's with v.

    A thread holds both elements of a pair: q changes in place without a barrier.
    """
    HALF: tl.constexpr = DIM // 2
    Q_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    dtype = x_ptr.dtype.element_ty
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_kv = tile >= Q_TILES
    head = tl.where(is_kv, HEADS + (tile - Q_TILES) * TILE_HEADS, tile * TILE_HEADS) + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, TILE)
    at = head[:, None] * DIM + dims[None, :]
    mask = (head < tl.where(is_kv, HEADS + KV_HEADS, HEADS))[:, None] & (dims < HALF)[None, :]
    x = x_ptr + token * x_stride + at
    low, high = pairs(x, mask, HALF)
    if NORMS:
        factor = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 1) / DIM + eps)
        low_weight, high_weight = pairs(weight_ptr + at, mask, HALF)
        low = (low * factor[:, None]).to(dtype).to(tl.float32) * (low_weight + offset)
        high = (high * factor[:, None]).to(dtype).to(tl.float32) * (high_weight + offset)
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    turn = token * turn_stride + dims[None, :]
    new_low, new_high = turned(low, high, cosine_ptr + turn, sine_ptr + turn, (dims < HALF)[None, :], dtype, HALF)
    if is_kv:
        BYTES: tl.constexpr = UNIT_HEADS if k_cache_ptr.dtype.element_ty == tl.uint8 else 0  # of exponents
        place = tl.load(pages_ptr + token) * page_stride + tl.load(offsets_ptr + token) * (UNIT_HEADS * DIM + BYTES)
        to = place + (at - HEADS * DIM)
        exponents = place + (UNIT_HEADS * DIM + head - HEADS)[:, None]
        if UNIT_HEADS < KV_HEADS:
            unit = (head - HEADS)[:, None] // UNIT_HEADS
            to += unit * (unit_stride - UNIT_HEADS * DIM)
            exponents += unit * (unit_stride - UNIT_HEADS)
        _store_heads(k_cache_ptr + to, k_cache_ptr + exponents, new_low, new_high, mask, HALF)
        v_low, v_high = pairs(x + KV_HEADS * DIM, mask, HALF)
        _store_heads(v_cache_ptr + to, v_cache_ptr + exponents, v_low, v_high, mask, HALF)
    else:
        store_pairs(x, new_low, new_high, mask, HALF)


def rope_write(
    qkv: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    units: Units = ONE_UNIT,
) -> torch.Tensor:
    """Return q [T, heads, dim] of qkv, changed in place; write K and V to (pages, offsets).

    qkv [T, heads + 2 * kv_heads, dim]; norm weight [heads + kv_heads, dim]; turn from `Rope.at`;
    caches are unit 0 of KVPool.k; pages, offsets int64[T].
    """
    (rows, all_heads, dim), (cosine, sine), kv_heads = qkv.shape, turn, k_cache.shape[2] * units.count
    heads = all_heads - 2 * kv_heads
    assert qkv.stride()[1:] == (dim, 1) and dim % 2 == 0, (qkv.shape, qkv.stride())
    assert cosine.shape == sine.shape == (rows, 1, dim), cosine.shape
    assert cosine.stride() == sine.stride() and cosine.stride(2) == 1, cosine.stride()
    assert weight is None or (weight.is_contiguous() and weight.shape == (heads + kv_heads, dim)), (weight, qkv.shape)
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == dim, (k_cache.shape, v_cache.shape, dim)
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert len(pages) == len(offsets) == rows, (pages.shape, offsets.shape, rows)
    rope_write_kernel[(rows, triton.cdiv(heads, HEAD_TILE) + triton.cdiv(kv_heads, HEAD_TILE))](
        qkv,
        qkv if weight is None else weight,
        cosine,
        sine,
        k_cache,
        v_cache,
        pages,
        offsets,
        qkv.stride(0),
        cosine.stride(0),
        k_cache.stride(0),
        units.stride,
        eps,
        offset,
        HEADS=heads,
        KV_HEADS=kv_heads,
        UNIT_HEADS=k_cache.shape[2],
        DIM=dim,
        NORMS=weight is not None,
        TILE=triton.next_power_of_2(dim // 2),
        TILE_HEADS=HEAD_TILE,
        num_warps=4,
    )
    return qkv[:, :heads]
