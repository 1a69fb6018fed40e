# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Prompt attention over written pages for GPUs.

FlashAttention-2's loop (Dao 2023) over the page table: first tokens visible to all rows of a tile,
unmasked, then the few at its diagonal. Apart from rounding, chunks do not change results.

For few rows with a long context programs take a span (extend_plan.py), then merge.

With MLA latents rows are always pairs. With a window, earlier blocks are skipped. Sinks are initial
scores of a row's first span.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.decode import PagedLayer, tile_dim
from engine.kernels.triton.extend_plan import MAX_SPANS, ExtendPlan
from engine.kernels.triton.paged_tiles import (
    KERNEL_LOG2_E,
    LayerPages,
    Queries,
    block_scores,
    block_values,
    load_q,
    products,
    row_starts,
    value_weights,
)


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    rows: int
    block: int
    warps: int
    stages: int


@cache
def extend_tiles(*, dim: int, dtype: torch.dtype, exponents: int = 0) -> ExtendTiles:
    """Return tiles for sm_90; tests bound their spills. `exponents`: of a token in a unit."""
    if dtype == torch.float32:  # no tensor cores for exact fp32: small tiles
        return ExtendTiles(rows=16, block=32 if dim <= 128 else 16, warps=8, stages=2)
    if exponents:  # codes that widen take registers, and loads of less than 8 bytes more
        plain = extend_tiles(dim=dim, dtype=dtype)
        return replace(plain, block=plain.block // (1 + (dim > 128)) // (1 + (exponents % 8 > 0)))
    if dim > 128:
        return ExtendTiles(rows=64, block=64, warps=8, stages=2)
    return ExtendTiles(rows=128, block=128, warps=8, stages=3)  # an H200 took 1.30 times as long for blocks of 64


@cache
def latent_extend_tiles(*, dtype: torch.dtype) -> ExtendTiles:
    if dtype == torch.float32:
        return ExtendTiles(rows=16, block=16, warps=8, stages=2)
    return ExtendTiles(rows=64, block=32, warps=8, stages=2)


class _Unit(NamedTuple):
    """A program's tile of rows; a token has PER_TOKEN rows, of different heads."""

    ptr: Any  # (request, tile) int32; SPLIT: (request, tile, begin, end, part row)
    request: Any
    tile: Any
    first: Any  # row of the request in q
    q_len: Any
    kv_len: Any
    BLOCK_ROWS: Any
    PER_TOKEN: Any
    SPLIT: Any


class _Rows(NamedTuple):
    q: Any
    q_rest: Any  # of latents
    position: Any  # of each row
    low: Any  # first token visible to any row
    end: Any
    kv_head: Any
    table: Any


@triton.jit
def _step(pages):
    """log2 of a weight by unit of a score."""
    return 1.0 if pages.CAP != 0.0 else pages.scale


@triton.jit
def _extend_block(rows, attended, at, pages, MASKED: tl.constexpr, SPLIT: tl.constexpr):
    """Add a block to (best, total, acc).

    MASKED: some tokens of it are not visible to some rows; SPLIT: a row may have no visible one.
    """
    best, total, acc = attended
    token = at + tl.arange(0, pages.BLOCK)
    there = token
    if MASKED:
        mask_n = token < rows.end
        there = tl.minimum(token, rows.end - 1)  # masked ones read a valid token: no value is made up
        if pages.WINDOW:
            mask_n = mask_n & (token >= rows.low)  # before it, the page table may name another request's page
            there = tl.maximum(there, rows.low)
    start = row_starts(there, rows.kv_head, rows.table, pages)
    if pages.CAP != 0.0:
        scores, k = block_scores(rows.q, rows.q_rest, start, rows.kv_head, pages)
    else:  # the scale joins the exponent: one FFMA a score
        scores, k = products(rows.q, rows.q_rest, start, rows.kv_head, pages)
    if MASKED:
        # rows past the end see what the last row sees: no empty row, no NaN
        seen = (token[None, :] <= rows.position[:, None]) & mask_n[None, :]
        if pages.WINDOW:
            seen = seen & (token[None, :] > rows.position[:, None] - pages.WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    best_now = tl.maximum(best, tl.max(scores, 1))
    base = best_now
    if MASKED and (SPLIT or pages.WINDOW):
        base = tl.where(best_now == float("-inf"), 0.0, best_now)  # rows without a token so far: weights of 0, no NaN
    step = _step(pages)
    factor = tl.exp2((best - base) * step)
    weights = tl.exp2(scores * step - (base * step)[:, None])
    # of codes, K that is widened is in registers, and would take as many as V once more
    v = tl.trans(k) if pages.REST and not pages.EXPONENTS else block_values(start, rows.q.dtype, pages)
    acc = acc * factor[:, None]
    of_v = value_weights(weights, start, rows.kv_head, rows.q.dtype, pages)
    acc = tl.dot(of_v, v, acc, input_precision=pages.PRECISION)
    return best_now, total * factor + tl.sum(weights, 1), acc


@triton.jit
def _spans(unit, before, low, pages):
    """Bounds of visible tokens: of masked blocks, of those all rows see, of masked ones again."""
    begin, last = 0, unit.tile * unit.BLOCK_ROWS + (unit.BLOCK_ROWS - 1)
    seen = tl.minimum(unit.kv_len, unit.kv_len - unit.q_len + last // unit.PER_TOKEN + 1)
    end = seen
    if unit.SPLIT:
        begin, end = tl.load(unit.ptr + 2), tl.load(unit.ptr + 3)
    seen_by_all = begin  # latents mask all blocks: registers hold one such loop
    if not pages.REST:
        seen_by_all = tl.maximum(begin, tl.minimum(before + 1, end) // pages.BLOCK * pages.BLOCK)
    edge = begin
    if pages.WINDOW:
        begin = tl.maximum(begin, low // pages.BLOCK * pages.BLOCK)
        edge = tl.minimum(tl.cdiv(tl.maximum(seen - pages.WINDOW, 0), pages.BLOCK) * pages.BLOCK, end)
        edge = tl.maximum(begin, edge)
        seen_by_all = tl.maximum(edge, seen_by_all)
    return begin, edge, seen_by_all, end


@triton.jit
def _attend_rows(rows, attended, begin, edge, seen_by_all, pages, SPLIT: tl.constexpr):
    """Add all blocks of `_spans` to (best, total, acc)."""
    if pages.WINDOW:
        # fp32 is bound by products: loads ahead would only spill
        for at in tl.range(begin, edge, pages.BLOCK, num_stages=1 if pages.PRECISION == "ieee" else None):
            attended = _extend_block(rows, attended, at, pages, True, SPLIT)
    for at in range(edge, seen_by_all, pages.BLOCK):
        attended = _extend_block(rows, attended, at, pages, False, SPLIT)
    for at in range(seen_by_all, rows.end, pages.BLOCK):
        attended = _extend_block(rows, attended, at, pages, True, SPLIT)
    return attended


@triton.jit
def _heads_of(in_tile, queries, pages, PER_TOKEN: tl.constexpr):
    at = tl.program_id(1)
    if PER_TOKEN > 1:
        kv_head, head = at, at * PER_TOKEN + in_tile % PER_TOKEN
    else:
        kv_head, head = at // (queries.HEADS // pages.KV_HEADS), at
    return kv_head, head


@triton.jit
def _extend_tile(unit, queries, pages):
    WIDTH: tl.constexpr = pages.DIM + pages.REST
    in_tile = unit.tile * unit.BLOCK_ROWS + tl.arange(0, unit.BLOCK_ROWS)
    tokens = in_tile // unit.PER_TOKEN
    kv_head, head = _heads_of(in_tile, queries, pages, unit.PER_TOKEN)
    q_rows = queries.q_ptr + (unit.first + tokens).to(tl.int64)[:, None] * queries.q_stride
    at_head = head[:, None] * WIDTH if unit.PER_TOKEN > 1 else head * WIDTH
    q, q_rest = load_q(q_rows, at_head, tokens < unit.q_len, pages)
    before = unit.kv_len - unit.q_len + unit.tile * unit.BLOCK_ROWS // unit.PER_TOKEN  # tokens before the first row's
    position = unit.kv_len - unit.q_len + tokens
    low = 0
    if pages.WINDOW:
        position = tl.minimum(position, unit.kv_len - 1)
        low = tl.maximum(before + 1 - pages.WINDOW, 0)
    begin, edge, seen_by_all, end = _spans(unit, before, low, pages)
    best = tl.full([unit.BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([unit.BLOCK_ROWS], tl.float32)
    if queries.sinks_ptr is not None:
        is_first = begin <= low  # first span that the tile needs
        best = tl.where(is_first, tl.load(queries.sinks_ptr + head) * KERNEL_LOG2_E / _step(pages), best)
        total = tl.where(is_first, 1.0, total)
    acc = tl.zeros([unit.BLOCK_ROWS, pages.TILE_DIM], tl.float32)
    table = queries.table_ptr + tl.load(queries.slots_ptr + unit.request) * queries.table_stride
    rows = _Rows(q, q_rest, position, low, end, kv_head, table)
    return _attend_rows(rows, (best, total, acc), begin, edge, seen_by_all, pages, unit.SPLIT)


@triton.jit
def _store_tile(unit, attended, queries, pages, out_ptr, lse_ptr):
    best, total, acc = attended
    dims = tl.arange(0, pages.TILE_DIM)
    in_tile = unit.tile * unit.BLOCK_ROWS + tl.arange(0, unit.BLOCK_ROWS)
    tokens = in_tile // unit.PER_TOKEN
    kv_head, head = _heads_of(in_tile, queries, pages, unit.PER_TOKEN)
    # without splits of latents in another form than for q: fewer registers until here
    mask = in_tile < unit.q_len * unit.PER_TOKEN if pages.REST and not unit.SPLIT else tokens < unit.q_len
    mask_md = mask[:, None] & (dims < pages.DIM)[None, :]
    if unit.SPLIT:
        # a row without a token in the span: 0, and log2(0) has no weight in the merge; a NaN stays
        out = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])
        part_row = tl.load(unit.ptr + 4) + tl.arange(0, unit.BLOCK_ROWS)
        part = part_row.to(tl.int64) * pages.KV_HEADS + kv_head
        tl.store(out_ptr + part[:, None] * pages.DIM + dims[None, :], out, mask=mask_md)
        tl.store(lse_ptr + part, best * _step(pages) + tl.log2(total), mask=mask)
    else:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        if pages.REST:
            row = unit.first.to(tl.int64) * queries.HEADS + in_tile
        else:
            row = (unit.first + tokens).to(tl.int64) * queries.HEADS + head
        tl.store(out_ptr + (row * pages.DIM)[:, None] + dims[None, :], out, mask=mask_md)


@triton.jit
def _attend_unit(unit, queries, pages, out_ptr, lse_ptr):
    _store_tile(unit, _extend_tile(unit, queries, pages), queries, pages, out_ptr, lse_ptr)


@triton.jit(do_not_specialize=["table_stride"])
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [T, heads, dim] dense; SPLIT: [part_rows, kv_heads, dim] fp32, normalised
    lse_ptr,  # SPLIT: [part_rows, kv_heads] fp32: log2 of each row's sum of weights
    units_ptr,  # (request, tile) int32; SPLIT: (request, tile, begin, end, part row)
    table_ptr,
    slots_ptr,
    starts_ptr,  # [B + 1] int32: first row of each request in q
    kv_lens_ptr,
    sinks_ptr,
    q_stride,
    table_stride,
    page_grains,
    unit_grains,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    REST: tl.constexpr,
    TILE_REST: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (unit, head); with SPLIT or latents (unit, KV head), rows are (token, head) pairs."""
    PER_TOKEN: tl.constexpr = HEADS // KV_HEADS if SPLIT or REST > 0 else 1
    unit_ptr = units_ptr + tl.program_id(0) * (5 if SPLIT else 2)
    request, tile = tl.load(unit_ptr), tl.load(unit_ptr + 1)
    first = tl.load(starts_ptr + request)
    q_len = tl.load(starts_ptr + request + 1) - first
    if tile * BLOCK_ROWS >= q_len * PER_TOKEN:  # a list made without the lengths
        return
    _attend_unit(
        _Unit(unit_ptr, request, tile, first, q_len, tl.load(kv_lens_ptr + request), BLOCK_ROWS, PER_TOKEN, SPLIT),
        Queries(q_ptr, q_stride, kv_lens_ptr, slots_ptr, table_ptr, table_stride, sinks_ptr, HEADS, BLOCK_ROWS),
        LayerPages(
            k_ptr, v_ptr, page_grains, unit_grains, scale, KV_HEADS, UNIT_HEADS, DIM, PAGE_SIZE, TILE_DIM,
            BLOCK, PRECISION, WINDOW, CAP, REST, TILE_REST, EXPONENTS, GRAIN, WIDE,
        ),
        out_ptr,
        lse_ptr,
    )  # fmt: skip


@triton.jit
def extend_merge_kernel(
    part_ptr,  # [part_rows, kv_heads, dim] fp32
    lse_ptr,  # [part_rows, kv_heads] fp32
    out_ptr,  # [T, heads, dim] dense
    merges_ptr,  # (request, tile, part row, spans) int32
    starts_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Program (row of a tile, tile, KV head): the weighted sum of its parts."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    merge, kv_head = merges_ptr + tl.program_id(1) * 4, tl.program_id(2)
    request, tile = tl.load(merge), tl.load(merge + 1)
    first = tl.load(starts_ptr + request)
    height = tl.minimum(BLOCK_ROWS, (tl.load(starts_ptr + request + 1) - first) * GROUP - tile * BLOCK_ROWS)
    in_tile = tl.program_id(0)
    if in_tile < height:
        span, dims = tl.arange(0, SPANS), tl.arange(0, TILE_DIM)
        used = span < tl.load(merge + 3)
        part_row = tl.load(merge + 2) + span * height + in_tile
        part = part_row.to(tl.int64) * KV_HEADS + kv_head
        lse = tl.load(lse_ptr + part, mask=used, other=float("-inf"))
        weights = tl.exp2(lse - tl.max(lse, 0))
        mask = used[:, None] & (dims < DIM)[None, :]
        parts = tl.load(part_ptr + part[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        row = tile * BLOCK_ROWS + in_tile
        at_out = ((first + row // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP) * DIM
        tl.store(out_ptr + at_out + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < DIM)


@dataclass(frozen=True, slots=True)
class SplitWork:
    split: torch.Tensor
    merges: torch.Tensor
    part_rows: int
    most_rows: int


@dataclass(frozen=True, slots=True)
class ExtendWork:
    whole: torch.Tensor
    rounds: Sequence[SplitWork] = ()


def lists_of(plan: ExtendPlan) -> list[list[int]]:
    return [plan.whole, *(each for now in plan.rounds for each in (now.split, now.merges))]


def work_of(plan: ExtendPlan, lists: Iterator[torch.Tensor]) -> ExtendWork:
    whole = next(lists)
    return ExtendWork(whole, [SplitWork(next(lists), next(lists), now.part_rows, now.most_rows) for now in plan.rounds])


def any_whole(*, most_rows: int, requests: int, tiles: ExtendTiles, device: torch.device) -> ExtendWork:
    """Unsplit work for lengths known only on the device: all tiles of `most_rows`."""
    last_first = torch.arange(triton.cdiv(most_rows, tiles.rows) - 1, -1, -1, dtype=torch.int32, device=device)
    each = torch.arange(requests, dtype=torch.int32, device=device)
    return ExtendWork(torch.cartesian_prod(each, last_first).flatten())


def extend_constants(
    cache: dict[str, Any], tiles: ExtendTiles, *, split: bool, window: int = 0, cap: float = 0.0
) -> dict[str, Any]:
    rows = {"BLOCK_ROWS": tiles.rows, "BLOCK": tiles.block}
    return {**cache, **rows, "SPLIT": split, "WINDOW": window, "CAP": cap}


def merge_warps(dim: int) -> int:
    """Warps whose registers hold MAX_SPANS parts of a row."""
    return 4 if dim <= 256 else 16


def extend_merge_constants(*, heads: int, kv_heads: int, dim: int, tiles: ExtendTiles) -> dict[str, Any]:
    heads_and_dim = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "TILE_DIM": tile_dim(dim)}
    return {**heads_and_dim, "BLOCK_ROWS": tiles.rows, "SPANS": MAX_SPANS}


def extend(
    q: torch.Tensor,
    layer: PagedLayer,
    *,
    slots: torch.Tensor,
    starts: torch.Tensor,
    kv_lens: torch.Tensor,
    work: ExtendWork,
    tiles: ExtendTiles,
) -> torch.Tensor:
    """Return dense [T, heads, dim] for q [T, heads, dim]; rows may be strided.

    q is in the cache's dtype, or the cache has codes.

    slots int64[B]; starts int32[B + 1]; kv_lens int32[B]; `work` is `plan_extend` of these.
    """
    tokens, heads, width = q.shape
    dim, kv_heads = width - layer.rest, layer.kv_heads
    strides, cache = layer.arguments(heads=heads, kv_heads=kv_heads, dim=dim, dtype=q.dtype)
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)

    def launch(programs: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, *, split: bool) -> None:
        grid = (len(programs) // 5, kv_heads) if split else (len(programs) // 2, kv_heads if layer.rest else heads)
        extend_kernel[grid](
            q,
            layer.k,
            layer.v,
            target,
            lse,
            programs,
            layer.page_table,
            slots,
            starts,
            kv_lens,
            layer.softmax.sinks,
            q.stride(0),
            layer.page_table.stride(0),
            *strides,
            **extend_constants(cache, tiles, split=split, **layer.masking),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    if len(work.whole):
        launch(work.whole, out, out, split=False)
    for now in work.rounds:
        parts = torch.empty((now.part_rows, kv_heads, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((now.part_rows, kv_heads), dtype=torch.float32, device=q.device)
        launch(now.split, parts, lse, split=True)
        extend_merge_kernel[(now.most_rows, len(now.merges) // 4, kv_heads)](
            parts,
            lse,
            out,
            now.merges,
            starts,
            **extend_merge_constants(heads=heads, kv_heads=kv_heads, dim=dim, tiles=tiles),
            num_warps=merge_warps(dim),
        )
    return out
