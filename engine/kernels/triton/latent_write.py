# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Norm of new latents, rotary embedding of queries and the shared key, and writes of latents and
key.

One GPU launch per layer, rounded like torch's operators in engine/layers.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.fp8 import codes_of, exponents_of, magnitude
from engine.kernels.triton.rope_write import HEAD_TILE, pairs, store_pairs, turned


@triton.jit
def latent_write_kernel(
    q_ptr,  # [T, HEADS, RANK + REST]: the last elements are written
    rotary_ptr,  # [T, rotary_stride]: [HEADS, HEAD_STRIDE], of which REST are read
    latents_ptr,  # [T, latents_stride]: RANK + REST elements
    weight_ptr,  # [RANK]
    cosine_ptr,  # [T, turn_stride]
    sine_ptr,
    cache_ptr,  # page 0 of this layer
    pages_ptr,  # [T] int64
    offsets_ptr,  # [T] int64
    rotary_stride,
    latents_stride,
    turn_stride,
    page_stride,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    RANK: tl.constexpr,
    REST: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE: tl.constexpr,  # half a rotary part
    TILE_HEADS: tl.constexpr,
):
    """Program (token, 0): the latent and key into the cache; (token, 1 + tile): queries."""
    HALF: tl.constexpr = REST // 2
    dtype = q_ptr.dtype.element_ty
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1
    dims = tl.arange(0, TILE)
    turn = token * turn_stride + dims
    if tile < 0:
        latents = latents_ptr + token * latents_stride
        rank = tl.arange(0, TILE_RANK)
        latent = tl.load(latents + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps)
        weight = tl.load(weight_ptr + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        kept = (latent * factor * weight).to(dtype)
        low, high = pairs(latents + RANK + dims, dims < HALF, HALF)
        key_low, key_high = turned(low, high, cosine_ptr + turn, sine_ptr + turn, dims < HALF, dtype, HALF)
        to = cache_ptr + tl.load(pages_ptr + token) * page_stride + tl.load(offsets_ptr + token) * token_stride
        if cache_ptr.dtype.element_ty == tl.uint8:
            of_key = tl.max(tl.maximum(magnitude(key_low), magnitude(key_high)), 0)
            largest = tl.maximum(tl.max(magnitude(kept), 0), of_key)
            tl.store(to + (RANK + REST), exponents_of(largest).to(tl.uint8))
            kept, key_low, key_high = codes_of(kept, largest), codes_of(key_low, largest), codes_of(key_high, largest)
        tl.store(to + rank, kept.to(cache_ptr.dtype.element_ty), mask=rank < RANK)
        store_pairs(to + RANK + dims, key_low, key_high, dims < HALF, HALF)
    else:
        head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
        mask = (head < HEADS) & (dims < HALF)[None, :]
        lows, highs = pairs(rotary_ptr + token * rotary_stride + head * HEAD_STRIDE + dims[None, :], mask, HALF)
        turns, there = turn[None, :], (dims < HALF)[None, :]
        lows, highs = turned(lows, highs, cosine_ptr + turns, sine_ptr + turns, there, dtype, HALF)
        at = q_ptr + (token * HEADS + head) * (RANK + REST) + RANK + dims[None, :]
        store_pairs(at, lows, highs, mask, HALF)


def latent_write(
    q: torch.Tensor,
    rotary: torch.Tensor,
    latents: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float],
    places: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return q, completed in place; write latents to `places`, (pages, offsets) int64[T].

    q, rotary, latents, turn: of NewLatents; norm: weight [rank], eps; cache: KVPool.k.
    """
    (rows, heads, width), rest, (cosine, sine) = q.shape, rotary.shape[2], turn
    (weight, eps), (pages, offsets) = norm, places
    rank = width - rest
    assert q.is_contiguous() and rotary.stride(2) == 1 and rest % 2 == 0, (q.stride(), rotary.stride())
    assert latents.shape == (rows, width) and latents.stride(1) == 1 and weight.shape == (rank,), latents.shape
    assert cosine.shape == sine.shape == (rows, 1, rest), cosine.shape
    assert cosine.stride() == sine.stride() and cosine.stride(2) == 1, cosine.stride()
    assert cache.shape[2:] == (1, width) and len(pages) == len(offsets) == rows, (cache.shape, pages.shape, rows)
    latent_write_kernel[(rows, 1 + triton.cdiv(heads, HEAD_TILE))](
        q,
        rotary,
        latents,
        weight,
        cosine,
        sine,
        cache,
        pages,
        offsets,
        rotary.stride(0),
        latents.stride(0),
        cosine.stride(0),
        cache.stride(0),
        cache.stride(1),
        eps,
        HEADS=heads,
        HEAD_STRIDE=rotary.stride(1),
        RANK=rank,
        REST=rest,
        TILE_RANK=triton.next_power_of_2(rank),
        TILE=triton.next_power_of_2(rest // 2),
        TILE_HEADS=HEAD_TILE,
        num_warps=4,
    )
    return q
