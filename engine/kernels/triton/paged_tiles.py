# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Tiles of attention over pages, for decode.py and extend.py: addresses of rows, loads, scores.

Arguments of kernels travel between their functions by topic. Capital fields are known when
compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

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

    Counted in grains, since 64-bit addresses were most of a step's instructions.
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
    if pages.WIDE:
        page = page.to(tl.int64)
    return (page * pages.page_grains + row).to(tl.int64) * pages.GRAIN


@triton.jit
def products(q, q_rest, start, pages):
    """q K^T [rows, BLOCK] of tokens whose rows start there, and K [dim, BLOCK]."""
    dims = tl.arange(0, pages.TILE_DIM)
    at = pages.k_ptr + start[None, :] + dims[:, None]
    k = tl.load(at) if pages.TILE_DIM == pages.DIM else tl.load(at, mask=(dims < pages.DIM)[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision=pages.PRECISION)
    if pages.REST:
        rest = tl.arange(0, pages.TILE_REST)
        at_rest = pages.k_ptr + pages.DIM + start[None, :] + rest[:, None]
        k_rest = tl.load(at_rest, mask=(rest < pages.REST)[:, None], other=0.0)
        scores = tl.dot(q_rest, k_rest, scores, input_precision=pages.PRECISION)
    return scores, k


@triton.jit
def block_scores(q, q_rest, start, pages):
    """Scores [rows, BLOCK] times log2(e), and K [dim, BLOCK]."""
    scores, k = products(q, q_rest, start, pages)
    scores = scores * pages.scale
    if pages.CAP != 0.0:
        scores = _capped(scores, pages.CAP)
    return scores, k


@triton.jit
def block_values(start, pages):
    """V [BLOCK, dim] of tokens whose rows start there."""
    dims = tl.arange(0, pages.TILE_DIM)
    at = pages.v_ptr + start[:, None] + dims[None, :]
    v = tl.load(at) if pages.TILE_DIM == pages.DIM else tl.load(at, mask=(dims < pages.DIM)[None, :], other=0.0)
    return v
