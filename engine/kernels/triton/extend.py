# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Prompt attention over written pages for GPUs.

FlashAttention-2's loop (Dao 2023) over the page table: first tokens visible to all rows of a tile,
unmasked, then the few at its diagonal. Apart from rounding, chunks do not change results.

For few rows with a long context programs take a span and all query heads of a KV head
(extend_plan.py), then merge (Flash-Decoding, Dao et al. 2023), so that no multiprocessor idles.

With MLA latents rows are always pairs. With a window, earlier blocks are skipped. Sinks are initial
scores of a row's first span.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton.decode import KERNEL_LOG2_E, PagedLayer, capped, row_start, tile_dim
from engine.kernels.triton.extend_plan import MAX_SPANS, ExtendPlan


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    rows: int
    block: int
    warps: int
    stages: int


@cache
def extend_tiles(*, dim: int, dtype: torch.dtype) -> ExtendTiles:
    """Return tiles for sm_90 without spills (tests compile it)."""
    if dtype == torch.float32:  # no tensor cores for exact fp32: small tiles
        return ExtendTiles(rows=16, block=32 if dim <= 128 else 16, warps=8, stages=2)
    if dim > 128:
        return ExtendTiles(rows=64, block=64, warps=8, stages=2)
    return ExtendTiles(rows=128, block=64, warps=8, stages=5)  # 5: two blocks ahead, see DecodeTiles


@cache
def latent_extend_tiles(*, dtype: torch.dtype) -> ExtendTiles:
    if dtype == torch.float32:
        return ExtendTiles(rows=16, block=16, warps=8, stages=2)
    return ExtendTiles(rows=64, block=32, warps=8, stages=2)


@triton.jit
def extend_block(
    q,
    q_rest,  # of latents
    best,
    total,
    acc,
    at,
    low,  # first token visible to any row
    end,
    position,  # of each row
    table,
    k_ptr,
    v_ptr,
    page_grains,
    unit_grains,
    kv_head,
    scale,
    KV_HEADS: tl.constexpr,
    UNIT_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,  # not every row sees every token of this block
    SPLIT: tl.constexpr,  # a row may see none
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    REST: tl.constexpr,
    TILE_REST: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Process one block; return (best, total, acc)."""
    dims = tl.arange(0, TILE_DIM)
    token = at + tl.arange(0, BLOCK)
    there = token
    if MASKED:
        mask_n = token < end
        there = tl.minimum(token, end - 1)  # masked ones read a valid token: no value is made up
        if WINDOW:
            mask_n = mask_n & (token >= low)  # before it, the page table may name another request's page
            there = tl.maximum(there, low)
    there = there.to(tl.uint32)
    page = tl.load(table + there // PAGE_SIZE)
    in_page = (there % PAGE_SIZE).to(tl.int32)
    start = row_start(page, in_page, kv_head, page_grains, unit_grains, KV_HEADS, UNIT_HEADS, DIM, REST, GRAIN, WIDE)
    at_k = k_ptr + start[None, :] + dims[:, None]
    at_v = v_ptr + start[:, None] + dims[None, :]
    k = tl.load(at_k) if TILE_DIM == DIM else tl.load(at_k, mask=(dims < DIM)[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if REST:
        rest = tl.arange(0, TILE_REST)
        k_rest = tl.load(k_ptr + DIM + start[None, :] + rest[:, None], mask=(rest < REST)[:, None], other=0.0)
        scores = tl.dot(q_rest, k_rest, scores, input_precision=PRECISION)
    scores = scores * scale
    if CAP != 0.0:
        scores = capped(scores, CAP)
    if MASKED:
        # rows past the end see what the last row sees: no empty row, no NaN
        seen = (token[None, :] <= position[:, None]) & mask_n[None, :]
        if WINDOW:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    best_now = tl.maximum(best, tl.max(scores, 1))
    base = best_now
    if MASKED and (SPLIT or WINDOW):
        base = tl.where(best_now == float("-inf"), 0.0, best_now)  # rows without a token so far: weights of 0, no NaN
    factor = tl.exp2(best - base)
    weights = tl.exp2(scores - base[:, None])
    if REST:
        v = tl.trans(k)
    elif TILE_DIM == DIM:
        v = tl.load(at_v)
    else:
        v = tl.load(at_v, mask=(dims < DIM)[None, :], other=0.0)
    acc = acc * factor[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return best_now, total * factor + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["table_stride"])
def extend_kernel(
    q_ptr,  # [T, heads, dim + rest]; heads of a row are dense
    k_ptr,  # unit 0 of page 0 of this layer's K; rows of a token are dense in a unit
    v_ptr,
    out_ptr,  # [T, heads, dim] dense; SPLIT: [part_rows, kv_heads, dim] fp32, normalised
    lse_ptr,  # SPLIT: [part_rows, kv_heads] fp32: log2 of each row's sum of weights
    units_ptr,  # (request, tile) int32; SPLIT: (request, tile, begin, end, part row)
    table_ptr,  # [slots, table_stride] int32
    slots_ptr,  # [B] int64
    starts_ptr,  # [B + 1] int32: first row of each request in q
    kv_lens_ptr,  # [B] int32
    sinks_ptr,  # [heads] fp32: a score per head without a value; None: no sinks
    q_stride,
    table_stride,
    page_grains,
    unit_grains,
    scale,  # times log2(e)
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
    REST: tl.constexpr,  # elements of K after V's, for latents; 0: separate K and V
    TILE_REST: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (unit, head); with SPLIT or latents (unit, KV head), rows are (token, head) pairs."""
    PAIRS: tl.constexpr = SPLIT or REST > 0
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = DIM + REST
    unit = units_ptr + tl.program_id(0) * (5 if SPLIT else 2)
    request, tile = tl.load(unit), tl.load(unit + 1)
    first = tl.load(starts_ptr + request)
    q_len = tl.load(starts_ptr + request + 1) - first
    if tile * BLOCK_ROWS >= q_len * (GROUP if PAIRS else 1):  # a list made without the lengths
        return
    kv_len = tl.load(kv_lens_ptr + request)
    rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, TILE_DIM)
    if PAIRS:
        kv_head = tl.program_id(1)
        tokens = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        if SPLIT:
            begin, end = tl.load(unit + 2), tl.load(unit + 3)
        else:
            begin = 0
            end = tl.minimum(kv_len, kv_len - q_len + (tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP + 1)
        before = kv_len - q_len + tile * BLOCK_ROWS // GROUP  # tokens before the first row's
        # latents mask all blocks: registers hold one such loop
        seen_by_all = begin if REST else tl.maximum(begin, tl.minimum(before + 1, end) // BLOCK * BLOCK)
        at_head = head[:, None] * WIDTH + dims[None, :]
    else:
        head = tl.program_id(1)
        kv_head = head // GROUP
        tokens = rows
        begin = 0
        before = kv_len - q_len + tile * BLOCK_ROWS
        end = tl.minimum(kv_len, before + BLOCK_ROWS)
        seen_by_all = (before + 1) // BLOCK * BLOCK
        at_head = head * DIM + dims[None, :]
    mask_md = (tokens < q_len)[:, None] & (dims < DIM)[None, :]
    in_batch = (first + tokens).to(tl.int64)
    q = tl.load(q_ptr + in_batch[:, None] * q_stride + at_head, mask=mask_md, other=0.0)
    q_rest = q
    if REST:
        rest = tl.arange(0, TILE_REST)
        at_rest = in_batch[:, None] * q_stride + head[:, None] * WIDTH + DIM + rest[None, :]
        q_rest = tl.load(q_ptr + at_rest, mask=(tokens < q_len)[:, None] & (rest < REST)[None, :], other=0.0)
    if REST and not SPLIT:
        mask_md = (rows < q_len * GROUP)[:, None] & (dims < DIM)[None, :]  # recomputed: fewer registers until the end
    position = kv_len - q_len + tokens
    low = 0
    if WINDOW:
        position = tl.minimum(position, kv_len - 1)
        low = tl.maximum(before + 1 - WINDOW, 0)
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if sinks_ptr is not None:
        is_first = begin <= low  # first span that the tile needs
        best = tl.where(is_first, tl.load(sinks_ptr + head) * KERNEL_LOG2_E, best)
        total = tl.where(is_first, 1.0, total)
    acc = tl.zeros([BLOCK_ROWS, TILE_DIM], tl.float32)
    table = table_ptr + tl.load(slots_ptr + request) * table_stride
    if WINDOW:
        begin = tl.maximum(begin, low // BLOCK * BLOCK)
        last = tl.minimum(kv_len - q_len + (tile * BLOCK_ROWS + BLOCK_ROWS - 1) // (GROUP if PAIRS else 1), kv_len - 1)
        edge = tl.minimum(tl.cdiv(tl.maximum(last + 1 - WINDOW, 0), BLOCK) * BLOCK, end)
        # fp32 is bound by products: loads ahead would only spill
        for at in tl.range(begin, edge, BLOCK, num_stages=1 if PRECISION == "ieee" else None):
            best, total, acc = extend_block(
                q, q_rest, best, total, acc, at, low, end, position, table, k_ptr, v_ptr, page_grains, unit_grains, kv_head, scale,
                KV_HEADS, UNIT_HEADS, DIM, PAGE_SIZE, TILE_DIM, BLOCK, PRECISION, True, SPLIT, WINDOW, CAP,
                REST, TILE_REST, GRAIN, WIDE,
            )  # fmt: skip
        begin = tl.maximum(begin, edge)
        seen_by_all = tl.maximum(begin, seen_by_all)
    for at in range(begin, seen_by_all, BLOCK):
        best, total, acc = extend_block(
            q, q_rest, best, total, acc, at, low, end, position, table, k_ptr, v_ptr, page_grains, unit_grains, kv_head, scale,
            KV_HEADS, UNIT_HEADS, DIM, PAGE_SIZE, TILE_DIM, BLOCK, PRECISION, False, SPLIT, WINDOW, CAP,
                REST, TILE_REST, GRAIN, WIDE,
        )  # fmt: skip
    for at in range(seen_by_all, end, BLOCK):
        best, total, acc = extend_block(
            q, q_rest, best, total, acc, at, low, end, position, table, k_ptr, v_ptr, page_grains, unit_grains, kv_head, scale,
            KV_HEADS, UNIT_HEADS, DIM, PAGE_SIZE, TILE_DIM, BLOCK, PRECISION, True, SPLIT, WINDOW, CAP,
                REST, TILE_REST, GRAIN, WIDE,
        )  # fmt: skip
    if SPLIT:
        # a row without a token in the span: 0, and log2(0) has no weight in the merge; a NaN stays
        out = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])
        part_row = tl.load(unit + 4) + tl.arange(0, BLOCK_ROWS)
        part = part_row.to(tl.int64) * KV_HEADS + kv_head
        tl.store(out_ptr + part[:, None] * DIM + dims[None, :], out, mask=mask_md)
        tl.store(lse_ptr + part, best + tl.log2(total), mask=tokens < q_len)
    else:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        at_out = (first.to(tl.int64) * HEADS + rows if REST else in_batch * HEADS + head) * DIM
        tl.store(out_ptr + at_out[:, None] + dims[None, :], out, mask=mask_md)


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
    """Return dense [T, heads, dim] for q [T, heads, dim] in the cache's dtype; rows may be strided.

    slots int64[B]; starts int32[B + 1]; kv_lens int32[B]; `work` is `plan_extend` of these.
    """
    tokens, heads, width = q.shape
    dim, kv_heads = width - layer.rest, layer.kv_heads
    strides, cache = layer.arguments(heads=heads, kv_heads=kv_heads, dim=dim)
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
