# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Tiles of attention over pages, for decode.py and extend.py: addresses of rows, loads, scores.

Arguments of kernels travel between their functions by topic. Capital fields are known when
compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from engine.kernels.triton.fp8 import factors_of, values_of

LOG2_E = 1.4426950408889634
KERNEL_LOG2_E = tl.constexpr(LOG2_E)


class Queries(NamedTuple):
    """New tokens of requests, and where to find their context."""

    q_ptr: Any  # [T, heads, dim + rest]; heads of a row are dense
    q_stride: Any
    kv_lens_ptr: Any  # [B] int32
    slots_ptr: Any  # [B] int64
    table_ptr: Any  # [slots, table_stride] int32
    table_stride: Any
    sinks_ptr: Any  # [heads] fp32: a score per head without a value; None: no sinks
    HEADS: Any
    TILE_ROWS: Any


class LayerPages(NamedTuple):
    """K and V of a layer, and what scores are made by."""

    k_ptr: Any  # unit 0 of page 0 of this layer's K; rows of a token are dense in a unit
    v_ptr: Any
    page_grains: Any
    unit_grains: Any
    scale: Any  # times log2(e)
    KV_HEADS: Any
    UNIT_HEADS: Any
    DIM: Any
    PAGE_SIZE: Any
    TILE_DIM: Any
    BLOCK: Any  # tokens of a tile
    PRECISION: Any
    WINDOW: Any
    CAP: Any
    REST: Any  # elements of K after V's, for latents; 0: separate K and V
    TILE_REST: Any
    EXPONENTS: Any  # bytes behind a token's codes in a unit, exponents first; 0: K and V are no codes
    GRAIN: Any
    WIDE: Any


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """CAP * tanh(score / CAP) for scores times log2(e); exp2 saturates large ones to 1 or -1."""
    return CAP * KERNEL_LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / CAP)) + 1.0))


@triton.jit
def load_q(q_ptr, at, mask_rows, pages):
    """q [rows, TILE_DIM] from offsets `at` [rows, 1], and its REST."""
    dims = tl.arange(0, pages.TILE_DIM)
    q = tl.load(q_ptr + (at + dims[None, :]), mask=mask_rows[:, None] & (dims < pages.DIM)[None, :], other=0.0)
    q_rest = q
    if pages.REST:
        rest = tl.arange(0, pages.TILE_REST)
        mask = mask_rows[:, None] & (rest < pages.REST)[None, :]
        q_rest = tl.load(q_ptr + (at + pages.DIM + rest[None, :]), mask=mask, other=0.0)
    return q, q_rest


@triton.jit
def row_starts(token, kv_head, table, pages):
    """Offsets of a KV head's rows from page 0, of tokens of the request with this row of pages.

    Counted in grains: 64-bit addresses are slow.
    """
    GRAINS: tl.constexpr = (pages.DIM + pages.REST) // pages.GRAIN  # per row
    token = token.to(tl.uint32)
    page = tl.load(table + token // pages.PAGE_SIZE)
    in_page = (token % pages.PAGE_SIZE).to(tl.int32)
    if pages.REST:
        row = in_page * GRAINS
    else:
        row = (in_page * pages.UNIT_HEADS + kv_head) * GRAINS
        if pages.UNIT_HEADS < pages.KV_HEADS:
            row += kv_head // pages.UNIT_HEADS * (pages.unit_grains - pages.UNIT_HEADS * GRAINS)
    if pages.EXPONENTS:
        row += in_page * (pages.EXPONENTS // pages.GRAIN)
    if pages.WIDE:
        page = page.to(tl.int64)
    return (page * pages.page_grains + row).to(tl.int64) * pages.GRAIN


@triton.jit
def _loaded(ptr, mask, dtype: tl.constexpr, pages, MASKED: tl.constexpr):
    """Elements of K or V in `dtype`, codes without their scale."""
    x = tl.load(ptr, mask=mask, other=0) if MASKED else tl.load(ptr)
    return values_of(x, dtype) if pages.EXPONENTS else x


@triton.jit
def _factors(cache_ptr, start, kv_head, pages):
    """Scales of the codes [BLOCK] that start there."""
    behind, in_unit = pages.DIM + pages.REST, 0
    if not pages.REST:
        in_unit = kv_head % pages.UNIT_HEADS
        behind = (pages.UNIT_HEADS - in_unit) * pages.DIM
    if pages.GRAIN % 4 == 0:  # by words: narrower loads are not pipelined
        words_ptr = cache_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        exponents = tl.load(words_ptr + ((start + behind >> 2) + in_unit // 4)) >> in_unit % 4 * 8
    else:
        exponents = tl.load(cache_ptr + (start + behind + in_unit)).to(tl.int32)
    return factors_of(exponents & 0xFF)


@triton.jit
def products(q, q_rest, start, kv_head, pages):
    """q K^T [rows, BLOCK] of tokens whose rows start there, and K [dim, BLOCK]."""
    dims = tl.arange(0, pages.TILE_DIM)
    at = pages.k_ptr + start[None, :] + dims[:, None]
    k = _loaded(at, (dims < pages.DIM)[:, None], q.dtype, pages, pages.TILE_DIM != pages.DIM)
    scores = tl.dot(q, k, input_precision=pages.PRECISION)
    if pages.REST:
        rest = tl.arange(0, pages.TILE_REST)
        at_rest = pages.k_ptr + pages.DIM + start[None, :] + rest[:, None]
        k_rest = _loaded(at_rest, (rest < pages.REST)[:, None], q.dtype, pages, True)
        scores = tl.dot(q_rest, k_rest, scores, input_precision=pages.PRECISION)
    if pages.EXPONENTS:
        scores *= _factors(pages.k_ptr, start, kv_head, pages)[None, :]
    return scores, k


@triton.jit
def block_scores(q, q_rest, start, kv_head, pages):
    """Scores [rows, BLOCK] times log2(e), and K [dim, BLOCK]."""
    scores, k = products(q, q_rest, start, kv_head, pages)
    scores = scores * pages.scale
    if pages.CAP != 0.0:
        scores = _capped(scores, pages.CAP)
    return scores, k


@triton.jit
def block_values(start, dtype: tl.constexpr, pages):
    """V [BLOCK, dim] of tokens whose rows start there."""
    dims = tl.arange(0, pages.TILE_DIM)
    at = pages.v_ptr + start[:, None] + dims[None, :]
    return _loaded(at, (dims < pages.DIM)[None, :], dtype, pages, pages.TILE_DIM != pages.DIM)


@triton.jit
def value_weights(weights, start, kv_head, dtype: tl.constexpr, pages):
    """Weights [rows, BLOCK] of what `block_values` returns."""
    if pages.EXPONENTS:
        weights *= _factors(pages.v_ptr, start, kv_head, pages)[None, :]
    return weights.to(dtype)
