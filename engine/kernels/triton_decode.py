# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Paged decode attention for GPUs: partial softmax over splits of a request's tokens, merged.

Flash-Decoding (Dao et al. 2023); one tile holds all query heads of a kv head, so K and V are read once. The splits of a
request depend on its length alone, and are merged in their order: its result is the same in any batch.

The program that ends the last split of a request and kv head merges them, so no launch follows. Splits are counted: a
barrier orders the stores of all threads before one thread's atomic, which releases them to the GPU and acquires those of
the splits before (PTX ISA, "Memory Consistency Model"). The last one sets the count back to zero for the next layer. No
program waits for another, and each merges behind its loop over splits, which needs the registers.

Lengths are read on the device: `split_list` lists all splits once a step, and each of n programs takes every n-th. So one
captured graph serves every length, and a long context costs a short request nothing. For the same reason numbers that
change from step to step are in `do_not_specialize`: a kernel is compiled once for a model.

Latents (MLA) are one row of a token for all heads: V is the first DIM elements of K, and REST are behind them. What is called a
kv head then is a tile of query heads. V is loaded anew, from a cache: the small products need another layout of it than of
K, and the pipeliner loads nothing ahead that is needed in two.

A layer with a window has a list of its own, of the splits of the tokens that the window shows: others cost nothing. Sinks
join the first split, as a score that the softmax begins with. Windows, sinks, caps and latents have not run on a GPU yet.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kv.kv_pool import ONE_UNIT, Units
from engine.kv.step_batch import TreePaths

MIN_TILE_HEADS = 16  # what tl.dot takes at least
LOG2_E = 1.4426950408889634
KERNEL_LOG2_E = tl.constexpr(LOG2_E)
LIST_TILE = 256  # requests that a program of the split list reads at a time
MERGED_AT_ONCE, MERGED_ELEMENTS = 8, 4096  # splits in flight, and what of them registers hold without spills
REGISTERS, MOST_REGISTERS = 65536, 255  # of a multiprocessor, of a thread
INTERPRETED_PROGRAMS = 3  # no device to ask: few, so that each has several splits


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """`min_split`: least tokens of a split (long requests have `splits` longer ones); `block`: tokens of one tile;
    `per_sm`: programs per multiprocessor; `stages`: K and V depend on a page id that is loaded before, so Triton's
    pipeliner is one tile ahead with 3 stages and two with 5."""

    min_split: int = 256
    splits: int = 32
    block: int = 64
    warps: int = 2
    stages: int = 3
    per_sm: int = 4


@cache
def decode_tiles(*, kv_heads: int, dim: int, dtype: torch.dtype) -> DecodeTiles:
    """Keeps accumulators in registers on sm_90 (tests compile it). Few kv heads need more splits, or one long request
    leaves multiprocessors idle."""
    splits = min(64, max(16, 256 // triton.next_power_of_2(kv_heads)))
    if dtype == torch.float32:
        return DecodeTiles(
            splits=splits, warps=8 if dim > 128 else 4, stages=3, block=64 if dim <= 128 else 32, per_sm=1
        )
    return DecodeTiles(splits=splits, warps=4, stages=3, per_sm=2) if dim > 128 else DecodeTiles(splits=splits)


def head_tiles(heads: int) -> int:
    """Of latents: how many tiles of query heads read a token's row, each with the same number of heads."""
    return heads // max(n for n in range(1, MIN_TILE_HEADS + 1) if heads % n == 0)


@cache
def latent_decode_tiles(*, tiles_of_heads: int, dtype: torch.dtype) -> DecodeTiles:
    """As `decode_tiles`. Parts of a split are large: with many heads there are few splits."""
    splits = min(64, max(8, 64 // triton.next_power_of_2(tiles_of_heads)))
    if dtype == torch.float32:
        return DecodeTiles(splits=splits, warps=8, stages=1, block=16, per_sm=1)
    return DecodeTiles(splits=splits, warps=8, stages=5, block=32, per_sm=1)


@triton.jit
def split_tokens(kv_len, MIN_SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of each split of a request: a multiple of BLOCK."""
    per_split = tl.cdiv(tl.cdiv(kv_len, SPLITS), BLOCK) * BLOCK
    return tl.maximum(per_split, MIN_SPLIT)


@triton.jit
def seen_tokens(kv_len, WINDOW: tl.constexpr):
    """The last tokens of a request, which its newest one sees. WINDOW: 0 is all."""
    seen = kv_len
    if WINDOW:
        seen = tl.minimum(kv_len, WINDOW)
    return seen


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), of scores times log2(e). exp2 gives infinity or 0 of large ones, and so 1 or -1."""
    return CAP * KERNEL_LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / CAP)) + 1.0))


@triton.jit(do_not_specialize=["batch"])
def split_list_kernel(
    kv_lens_ptr,  # [B] int32
    list_ptr,  # [B * SPLITS + 1] int32
    done_ptr,  # [B, KV_HEADS] int32
    batch,
    KV_HEADS: tl.constexpr,
    TILE_KV_HEADS: tl.constexpr,
    TILE_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (request): its splits, behind those of the requests before it; none of them is done."""
    request = tl.program_id(0)
    before = tl.zeros([TILE_BATCH], tl.int32)
    for start in range(0, request, TILE_BATCH):
        at = start + tl.arange(0, TILE_BATCH)
        lens = seen_tokens(tl.load(kv_lens_ptr + at, mask=at < request, other=0), WINDOW)
        before += tl.cdiv(lens, split_tokens(lens, MIN_SPLIT, SPLITS, BLOCK))
    first = tl.sum(before)
    seen = seen_tokens(tl.load(kv_lens_ptr + request), WINDOW)
    count = tl.cdiv(seen, split_tokens(seen, MIN_SPLIT, SPLITS, BLOCK))
    split = tl.arange(0, SPLITS)
    tl.store(list_ptr + first + split, request * SPLITS + split, mask=split < count)
    if request == batch - 1:
        tl.store(list_ptr + batch * SPLITS, first + count)
    kv_head = tl.arange(0, TILE_KV_HEADS)
    tl.store(done_ptr + request * KV_HEADS + kv_head, tl.zeros([TILE_KV_HEADS], tl.int32), mask=kv_head < KV_HEADS)


@triton.jit
def merge_splits(
    part_ptr,
    lse_ptr,
    out_ptr,
    request,
    kv_head,
    used,  # splits of the request
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    TILE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The heads of a kv head: their parts, weighed by their sums, AT_ONCE splits after another."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    in_group, dims = tl.arange(0, TILE_GROUP), tl.arange(0, TILE_DIM)
    mask_h = in_group < GROUP
    mask = mask_h[:, None] & (dims < DIM)[None, :]
    row = request.to(tl.int64) * HEADS + kv_head * GROUP + in_group
    first_part = row + request.to(tl.int64) * ((SPLITS - 1) * HEADS)
    all_splits = tl.arange(0, SPLITS)
    mask_all = (all_splits < used)[:, None] & mask_h[None, :]
    all_lse = tl.load(lse_ptr + first_part[None, :] + all_splits[:, None] * HEADS, mask=mask_all, other=float("-inf"))
    best = tl.max(all_lse, 0)
    total = tl.zeros([TILE_GROUP], tl.float32)
    acc = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    for first in range(0, used, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        mask_s = split < used
        part = first_part[None, :] + split[:, None] * HEADS
        lse = tl.load(lse_ptr + part, mask=mask_s[:, None] & mask_h[None, :], other=float("-inf"))
        weights = tl.exp2(lse - best[None, :])
        at = part[:, :, None] * DIM + dims[None, None, :]
        parts = tl.load(part_ptr + at, mask=mask_s[:, None, None] & mask[None, :, :], other=0.0)
        total += tl.sum(weights, 0)
        acc += tl.sum(parts * weights[:, :, None], 0)
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * DIM + dims[None, :], out, mask=mask)


@triton.jit
def row_start(
    page,
    token,
    kv_head,
    page_grains,
    unit_grains,
    KV_HEADS: tl.constexpr,
    UNIT_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Elements from page 0 of a layer to the row of a kv head. `token`: of the page.

    Counted in grains, which 32 bits hold for most pools: addresses of rows were most of a step's instructions.
    """
    GRAINS: tl.constexpr = (DIM + REST) // GRAIN  # of a row
    if REST:
        row = token * GRAINS
    else:
        row = (token * UNIT_HEADS + kv_head) * GRAINS
        if UNIT_HEADS < KV_HEADS:
            row += kv_head // UNIT_HEADS * (unit_grains - UNIT_HEADS * GRAINS)
    if WIDE:
        page = page.to(tl.int64)
    return (page * page_grains + row).to(tl.int64) * GRAIN


@triton.jit(do_not_specialize=["batch", "table_stride", "path_stride"])
def decode_split_kernel(
    q_ptr,  # [B, heads, dim + rest]; heads of a row are dense
    k_ptr,  # unit 0 of page 0 of this layer's K; rows of a token are dense in a unit
    v_ptr,
    out_ptr,  # [B, heads, dim] dense
    part_ptr,  # [B, splits, heads, dim] fp32: normalised output of each split
    lse_ptr,  # [B, splits, heads] fp32: log2 of each split's sum of weights
    list_ptr,  # [B * splits + 1] int32: request * splits + split of each; the last is how many there are
    done_ptr,  # [B, kv_heads] int32: splits that are done, 0 before and after
    merges_ptr,  # [B * splits * kv_heads] int32: request * kv_heads + kv head; program i of n has every n-th from the i-th on
    table_ptr,  # [slots, table_stride] int32
    slots_ptr,  # [B] int64
    kv_lens_ptr,  # [B] int32
    sinks_ptr,  # [heads] fp32: a score of each that no value belongs to; None: there is none
    path_starts_ptr,  # [B] int32: as TreePaths says; None: all tokens lie at their own positions
    path_places_ptr,  # [B, path_stride] int32
    batch,
    q_stride,
    table_stride,
    path_stride,
    page_grains,
    unit_grains,
    scale,  # times log2(e)
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    REST: tl.constexpr,  # of latents: elements of K that V does not have; 0: K and V are apart
    TILE_REST: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program i of n: every n-th (split, kv head) of the list, from the i-th on; then the merges it is the last for."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    in_group = tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, TILE_DIM)
    mask_h = in_group < GROUP
    mask_d = dims < DIM
    mask_hd = mask_h[:, None] & mask_d[None, :]
    total_work = tl.load(list_ptr + batch * SPLITS) * KV_HEADS
    num_merges = 0
    for work in range(tl.program_id(0), total_work, tl.num_programs(0)):
        unit = tl.load(list_ptr + work // KV_HEADS)
        kv_head = work % KV_HEADS
        request = unit // SPLITS
        kv_len = tl.load(kv_lens_ptr + request)
        seen = seen_tokens(kv_len, WINDOW)
        per_split = split_tokens(seen, MIN_SPLIT, SPLITS, BLOCK)
        begin = (unit % SPLITS) * per_split
        if WINDOW:
            begin += kv_len - seen
        end = tl.minimum(begin + per_split, kv_len)
        at_q = request.to(tl.int64) * q_stride + kv_head * GROUP * (DIM + REST)
        q = tl.load(q_ptr + at_q + (in_group[:, None] * (DIM + REST) + dims[None, :]), mask=mask_hd, other=0.0)
        if REST:
            rest = tl.arange(0, TILE_REST)
            at_q_rest = at_q + DIM + in_group[:, None] * (DIM + REST) + rest[None, :]
            q_rest = tl.load(q_ptr + at_q_rest, mask=mask_h[:, None] & (rest < REST)[None, :], other=0.0)
        best = tl.full([TILE_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_HEADS], tl.float32)
        if sinks_ptr is not None:  # noqa: SIM102 (known when compiled); in the first split, which every request has
            if unit % SPLITS == 0:
                best = tl.load(sinks_ptr + kv_head * GROUP + in_group, mask=mask_h, other=0.0) * KERNEL_LOG2_E
                total += 1.0
        acc = tl.zeros([TILE_HEADS, TILE_DIM], tl.float32)
        table = table_ptr + tl.load(slots_ptr + request) * table_stride
        if path_starts_ptr is not None:
            path_start = tl.load(path_starts_ptr + request)
            path = path_places_ptr + (request.to(tl.int64) * path_stride - path_start)
        sums = tl.zeros([TILE_HEADS, BLOCK], tl.float32)  # by place in a block: threads add up once, behind the loop
        for at in range(begin, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            # behind the end the last token, whose V is finite: its weight is 0
            there = tl.minimum(token, end - 1)
            if path_starts_ptr is not None:
                place = tl.load(path + there, mask=there >= path_start, other=0)
                there = tl.where(there < path_start, there, place)
            there = there.to(tl.uint32)
            page = tl.load(table + there // PAGE_SIZE)
            in_page = (there % PAGE_SIZE).to(tl.int32)
            start = row_start(
                page, in_page, kv_head, page_grains, unit_grains, KV_HEADS, UNIT_HEADS, DIM, REST, GRAIN, WIDE
            )
            if TILE_DIM == DIM:
                k = tl.load(k_ptr + start[None, :] + dims[:, None])
            else:
                k = tl.load(k_ptr + start[None, :] + dims[:, None], mask=mask_d[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION)
            if REST:
                k_rest = tl.load(k_ptr + DIM + start[None, :] + rest[:, None], mask=(rest < REST)[:, None], other=0.0)
                scores = tl.dot(q_rest, k_rest, scores, input_precision=PRECISION)
            scores = scores * scale
            if CAP != 0.0:
                scores = capped(scores, CAP)
            scores = tl.where((token < end)[None, :], scores, float("-inf"))
            best_now = tl.maximum(best, tl.max(scores, 1))
            factor = tl.exp2(best - best_now)
            weights = tl.exp2(scores - best_now[:, None])
            if TILE_DIM == DIM:
                v = tl.load(v_ptr + start[:, None] + dims[None, :])
            else:
                v = tl.load(v_ptr + start[:, None] + dims[None, :], mask=mask_d[None, :], other=0.0)
            acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            if sinks_ptr is not None:
                total = total * factor
            sums = sums * factor[:, None] + weights
            best = best_now
        total += tl.sum(sums, 1)
        acc = acc / total[:, None]
        in_heads = in_group[:, None] * DIM + dims[None, :]
        used = tl.cdiv(seen, per_split)
        if used == 1:
            row = request.to(tl.int64) * HEADS + kv_head * GROUP
            tl.store(out_ptr + row * DIM + in_heads, acc.to(out_ptr.dtype.element_ty), mask=mask_hd)
        else:
            part = unit.to(tl.int64) * HEADS + kv_head * GROUP
            tl.store(part_ptr + part * DIM + in_heads, acc, mask=mask_hd)
            tl.store(lse_ptr + part + in_group, best + tl.log2(total), mask=mask_h)
            group = request * KV_HEADS + kv_head
            tl.debug_barrier()  # or one thread counts before another has stored
            if tl.atomic_add(done_ptr + group, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(done_ptr + group, 0)
                tl.store(merges_ptr + tl.program_id(0) + num_merges * tl.num_programs(0), group)
                num_merges += 1
    tl.debug_barrier()  # one thread has stored what all load
    for i in range(0, num_merges):
        group = tl.load(merges_ptr + tl.program_id(0) + i * tl.num_programs(0))
        request, kv_head = group // KV_HEADS, group % KV_HEADS
        seen = seen_tokens(tl.load(kv_lens_ptr + request), WINDOW)
        used = tl.cdiv(seen, split_tokens(seen, MIN_SPLIT, SPLITS, BLOCK))
        merge_splits(
            part_ptr, lse_ptr, out_ptr, request, kv_head, used,
            HEADS, KV_HEADS, DIM, TILE_GROUP, TILE_DIM, SPLITS, AT_ONCE,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grains:
    """The unit in which rows of pages are counted: a grain divides a row and the strides of pages and units. `size`: in elements.

    `wide`: the pool has more than 32 bits count.
    """

    size: int
    wide: bool = False

    @classmethod
    def of(cls, cache: torch.Tensor, units: Units, *, dim: int, rest: int = 0) -> "Grains":
        """`cache`: as KVPool.k, of unit 0."""
        size = gcd(cache.stride(0), units.stride, dim, rest)
        return cls(size, wide=cache.shape[0] * (cache.stride(0) // size) >= 1 << 31)


def cache_constants(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    units: int = 1,
    rest: int = 0,
    grains: Grains | None = None,
) -> dict[str, Any]:
    """Return the compile-time constants of kernels that read K and V. `dtype`: of the cache; `rest`: of latents, what K has behind V.

    `grains`: None: a row, or what its parts have in common.
    """
    grains = grains or Grains(gcd(dim, rest))
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "UNIT_HEADS": kv_heads // units,
        "DIM": dim,
        "PAGE_SIZE": page_size,
        "TILE_DIM": tile_dim(dim),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "REST": rest,
        "TILE_REST": tile_dim(rest),
        "GRAIN": grains.size,
        "WIDE": grains.wide,
    }


def grains_and_constants(
    cache: torch.Tensor, units: Units, *, heads: int, kv_heads: int, dim: int, rest: int
) -> tuple[Grains, dict[str, Any]]:
    """The `cache_constants` of a pool and what they count in. `cache`: as KVPool.k, of unit 0."""
    grains = Grains.of(cache, units, dim=dim, rest=rest)
    return grains, cache_constants(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        page_size=cache.shape[1],
        dtype=cache.dtype,
        units=units.count,
        rest=rest,
        grains=grains,
    )


def split_constants(cache: dict[str, Any], tiles: DecodeTiles, *, window: int = 0, cap: float = 0.0) -> dict[str, Any]:
    group = triton.next_power_of_2(cache["HEADS"] // cache["KV_HEADS"])
    at_once = max(1, min(MERGED_AT_ONCE, MERGED_ELEMENTS // (group * cache["TILE_DIM"])))
    heads = {"TILE_HEADS": max(MIN_TILE_HEADS, group), "TILE_GROUP": group}
    return {**cache, **heads, "AT_ONCE": at_once, **split_rule(tiles), "WINDOW": window, "CAP": cap}


def split_options(tiles: DecodeTiles) -> dict[str, int]:
    """Return the launch options of a split kernel. Without `maxnreg` ptxas makes room for more programs than are launched, and spills."""
    registers = min(MOST_REGISTERS, REGISTERS // (32 * tiles.warps * tiles.per_sm) // 8 * 8)
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": registers}


def list_constants(*, kv_heads: int, tiles: DecodeTiles, window: int = 0) -> dict[str, Any]:
    heads = {"KV_HEADS": kv_heads, "TILE_KV_HEADS": triton.next_power_of_2(kv_heads)}
    return {**heads, "TILE_BATCH": LIST_TILE, **split_rule(tiles), "WINDOW": window}


def tile_dim(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def split_rule(tiles: DecodeTiles) -> dict[str, int]:
    return {"BLOCK": tiles.block, "MIN_SPLIT": tiles.min_split, "SPLITS": tiles.splits}


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class SplitList:
    """units [B * splits + 1] int32: request * splits + split of each; the last is how many there are. done [B, kv_heads]
    int32: how many of a request are done, 0 between layers."""

    units: torch.Tensor
    done: torch.Tensor


def split_list(kv_lens: torch.Tensor, *, kv_heads: int, tiles: DecodeTiles, window: int = 0) -> SplitList:
    """The splits of requests of `kv_lens` [B] int32, for `decode`; once a step, for all layers of a window, one after another."""
    batch = len(kv_lens)
    units = torch.empty((batch * tiles.splits + 1,), dtype=torch.int32, device=kv_lens.device)
    done = torch.empty((batch, kv_heads), dtype=torch.int32, device=kv_lens.device)
    constants = list_constants(kv_heads=kv_heads, tiles=tiles, window=window)
    split_list_kernel[(batch,)](kv_lens, units, done, batch, **constants, num_warps=1)
    return SplitList(units, done)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    splits: SplitList,
    tiles: DecodeTiles,
    scale: float,
    units: Units = ONE_UNIT,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rest: int = 0,
    paths: TreePaths | None = None,
) -> torch.Tensor:
    """[B, heads, dim] dense. q [B, heads, dim] in the caches' dtype, rows may lie apart; caches as KVPool.k, of unit 0; page_table
    [slots, pages] int32; slots [B] int64; kv_lens [B] int32, at least 1; `splits`: `split_list` of these lengths, kv heads, tiles and `window`.

    `window`: of CacheSpec; `cap`, `sinks`: of Softmax. `rest`: of latents, the last elements of q and K, which V, their first `dim`,
    does not have; kv heads are `head_tiles` of them then. `paths`: of StepBatch.
    """
    batch, heads, width = q.shape
    dim, kv_heads = width - rest, head_tiles(heads) if rest else k_cache.shape[2] * units.count
    grains, cache = grains_and_constants(k_cache, units, heads=heads, kv_heads=kv_heads, dim=dim, rest=rest)
    parts = torch.empty((batch, tiles.splits, heads, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, tiles.splits, heads), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=q.device)
    merges = torch.empty((batch * tiles.splits * kv_heads,), dtype=torch.int32, device=q.device)
    programs = min(multiprocessors(q.device) * tiles.per_sm, batch * kv_heads * tiles.splits)
    decode_split_kernel[(programs,)](
        q,
        k_cache,
        v_cache,
        out,
        parts,
        lse,
        splits.units,
        splits.done,
        merges,
        page_table,
        slots,
        kv_lens,
        sinks,
        *((None, None) if paths is None else (paths.starts, paths.places)),
        batch,
        q.stride(0),
        page_table.stride(0),
        None if paths is None else paths.places.stride(0),
        k_cache.stride(0) // grains.size,
        units.stride // grains.size,
        scale * LOG2_E,
        **split_constants(cache, tiles, window=window, cap=cap),
        **split_options(tiles),
    )
    return out
