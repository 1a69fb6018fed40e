# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Paged decode attention for GPUs: partial softmax over splits of a context, merged.

Flash-Decoding (Dao et al. 2023); tiles of all query heads of a KV head read K and V once. Splits
depend on a request's length only and merge in order: equal results in any batch.

The program that ends the last split of a request and KV head merges, and resets the count. A
barrier orders stores before one thread's atomic, which releases them and acquires earlier splits'
(PTX ISA, "Memory Consistency Model").

One graph serves every length: `split_list` lists a step's splits on the device, and each of n
programs takes every n-th. `do_not_specialize` has all values of a step: one compilation per model.

MLA latents: a row per token, V is K's first DIM elements, REST follow; a "KV head" is a tile of
query heads. V is loaded again, from cache, in another layout: the pipeliner prefetches nothing used
in two products.

A window layer has its own list of visible splits. Sinks are initial scores of the first split.
Windows, sinks, caps and latents have not run on a GPU.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.paged_attention import Softmax
from engine.kernels.triton.paged_tiles import (
    KERNEL_LOG2_E,
    LOG2_E,
    LayerPages,
    Queries,
    block_scores,
    block_values,
    load_q,
    row_starts,
)
from engine.kv.kv_pool import ONE_UNIT, Units
from engine.kv.step_batch import TreePaths

MIN_TILE_HEADS = 16  # minimum of tl.dot
LIST_TILE = 256  # requests per read of a split list program
MERGED_AT_ONCE, MERGED_ELEMENTS = 8, 4096  # splits in flight, and elements that registers hold without spills
REGISTERS, MAX_REGISTERS = 65536, 255  # per multiprocessor, per thread
INTERPRETED_PROGRAMS = 3  # no device to query: few, so that each has several splits


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Sizes of tiles.

    - min_split: fewest tokens of a split; long contexts have `splits` longer ones
    - block: tokens of a tile; per_sm: programs per multiprocessor
    - stages: page ids load before K and V, so the pipeliner is one tile ahead with 3, two with 5
    """

    min_split: int = 256
    splits: int = 32
    block: int = 64
    warps: int = 2
    stages: int = 3
    per_sm: int = 4


@cache
def decode_tiles(*, kv_heads: int, dim: int, dtype: torch.dtype) -> DecodeTiles:
    """Return tiles for sm_90's registers (tests compile it).

    Few KV heads need more splits, or one long request leaves multiprocessors idle.
    """
    splits = min(64, max(16, 256 // triton.next_power_of_2(kv_heads)))
    if dtype == torch.float32:
        return DecodeTiles(
            splits=splits, warps=8 if dim > 128 else 4, stages=3, block=64 if dim <= 128 else 32, per_sm=1
        )
    return DecodeTiles(splits=splits, warps=4, stages=3, per_sm=2) if dim > 128 else DecodeTiles(splits=splits)


def head_tiles(heads: int) -> int:
    """Return how many equal tiles of query heads read a latent row."""
    return heads // max(n for n in range(1, MIN_TILE_HEADS + 1) if heads % n == 0)


@cache
def latent_decode_tiles(*, tiles_of_heads: int, dtype: torch.dtype) -> DecodeTiles:
    """Return tiles for latents: few splits with many heads, since parts are large."""
    splits = min(64, max(8, 64 // triton.next_power_of_2(tiles_of_heads)))
    if dtype == torch.float32:
        return DecodeTiles(splits=splits, warps=8, stages=1, block=16, per_sm=1)
    return DecodeTiles(splits=splits, warps=8, stages=5, block=32, per_sm=1)


class _SplitRule(NamedTuple):
    """Constants that a context's splits follow from."""

    BLOCK: Any
    MIN_SPLIT: Any
    SPLITS: Any
    WINDOW: Any


class _Work(NamedTuple):
    """List of a step's splits, and what programs note of finished ones."""

    list_ptr: Any  # [B * splits + 1] int32: request * splits + split of each; the last is how many there are
    batch: Any
    done_ptr: Any  # [B, kv_heads] int32: finished splits, 0 before and after
    merges_ptr: Any  # [B * splits * kv_heads] int32: request * kv_heads + kv head; program i of n: each n-th from i


class _Paths(NamedTuple):
    """KV slots of tokens that do not lie at their positions, see TreePaths."""

    starts_ptr: Any  # [B] int32; None: all tokens lie at their positions
    places_ptr: Any  # [B, stride] int32
    stride: Any


class SplitOutputs(NamedTuple):
    """Results, parts of them by split, and their shapes."""

    out_ptr: Any  # [B, heads, dim] dense
    part_ptr: Any  # [B, splits, heads, dim] fp32: normalised output of each split
    lse_ptr: Any  # [B, splits, heads] fp32: log2 of each split's sum of weights
    HEADS: Any
    KV_HEADS: Any
    DIM: Any
    TILE_HEADS: Any
    TILE_GROUP: Any
    TILE_DIM: Any
    SPLITS: Any
    AT_ONCE: Any  # splits in flight of a merge


@triton.jit
def _seen_tokens(kv_len, rule):
    """Number of visible tokens."""
    seen = kv_len
    if rule.WINDOW:
        seen = tl.minimum(kv_len, rule.WINDOW)
    return seen


@triton.jit
def _split_tokens(seen, rule):
    """Tokens per split of `seen` ones, a multiple of BLOCK."""
    per_split = tl.cdiv(tl.cdiv(seen, rule.SPLITS), rule.BLOCK) * rule.BLOCK
    return tl.maximum(per_split, rule.MIN_SPLIT)


@triton.jit
def _num_splits(kv_len, rule):
    seen = _seen_tokens(kv_len, rule)
    return tl.cdiv(seen, _split_tokens(seen, rule))


@triton.jit(do_not_specialize=["batch"])
def split_list_kernel(
    kv_lens_ptr,  # int32[B]
    list_ptr,  # int32[B * SPLITS + 1]
    done_ptr,  # int32[B, KV_HEADS]
    batch,
    KV_HEADS: tl.constexpr,
    TILE_KV_HEADS: tl.constexpr,
    TILE_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (request): list its splits after earlier requests'."""
    request = tl.program_id(0)
    before = tl.zeros([TILE_BATCH], tl.int32)
    for start in range(0, request, TILE_BATCH):
        at = start + tl.arange(0, TILE_BATCH)
        lens = tl.load(kv_lens_ptr + at, mask=at < request, other=0)
        before += _num_splits(lens, _SplitRule(BLOCK, MIN_SPLIT, SPLITS, WINDOW))
    first = tl.sum(before)
    count = _num_splits(tl.load(kv_lens_ptr + request), _SplitRule(BLOCK, MIN_SPLIT, SPLITS, WINDOW))
    split = tl.arange(0, SPLITS)
    tl.store(list_ptr + first + split, request * SPLITS + split, mask=split < count)
    if request == batch - 1:
        tl.store(list_ptr + batch * SPLITS, first + count)
    kv_head = tl.arange(0, TILE_KV_HEADS)
    tl.store(done_ptr + request * KV_HEADS + kv_head, tl.zeros([TILE_KV_HEADS], tl.int32), mask=kv_head < KV_HEADS)


@triton.jit
def merge_splits(request, kv_head, used, to):
    """Merge a KV head's parts of `used` splits, AT_ONCE of them at a time."""
    GROUP: tl.constexpr = to.HEADS // to.KV_HEADS
    in_group, dims = tl.arange(0, to.TILE_GROUP), tl.arange(0, to.TILE_DIM)
    mask_h = in_group < GROUP
    mask = mask_h[:, None] & (dims < to.DIM)[None, :]
    row = request.to(tl.int64) * to.HEADS + kv_head * GROUP + in_group
    first_part = row + request.to(tl.int64) * ((to.SPLITS - 1) * to.HEADS)
    all_splits = tl.arange(0, to.SPLITS)
    mask_all = (all_splits < used)[:, None] & mask_h[None, :]
    all_parts = first_part[None, :] + all_splits[:, None] * to.HEADS
    all_lse = tl.load(to.lse_ptr + all_parts, mask=mask_all, other=float("-inf"))
    best = tl.max(all_lse, 0)
    total = tl.zeros([to.TILE_GROUP], tl.float32)
    acc = tl.zeros([to.TILE_GROUP, to.TILE_DIM], tl.float32)
    for first in range(0, used, to.AT_ONCE):
        split = first + tl.arange(0, to.AT_ONCE)
        mask_s = split < used
        part = first_part[None, :] + split[:, None] * to.HEADS
        lse = tl.load(to.lse_ptr + part, mask=mask_s[:, None] & mask_h[None, :], other=float("-inf"))
        weights = tl.exp2(lse - best[None, :])
        at = part[:, :, None] * to.DIM + dims[None, None, :]
        parts = tl.load(to.part_ptr + at, mask=mask_s[:, None, None] & mask[None, :, :], other=0.0)
        total += tl.sum(weights, 0)
        acc += tl.sum(parts * weights[:, :, None], 0)
    out = (acc / total[:, None]).to(to.out_ptr.dtype.element_ty)
    tl.store(to.out_ptr + row[:, None] * to.DIM + dims[None, :], out, mask=mask)


@triton.jit
def _path_of(request, paths):
    """A request's KV slots by token, and the first token that has one; 0 and 0 without paths."""
    kv_slots, first = 0, 0
    if paths.starts_ptr is not None:
        first = tl.load(paths.starts_ptr + request)
        kv_slots = paths.places_ptr + (request.to(tl.int64) * paths.stride - first)
    return kv_slots, first


@triton.jit
def _attend_split(unit, kv_head, kv_len, queries, pages, rule, paths):
    """Return the best score, the sum of weights, and the normalised output of a split."""
    GROUP: tl.constexpr = queries.HEADS // pages.KV_HEADS
    WIDTH: tl.constexpr = pages.DIM + pages.REST
    request, in_group = unit // rule.SPLITS, tl.arange(0, queries.TILE_ROWS)
    mask_h = in_group < GROUP
    seen = _seen_tokens(kv_len, rule)
    per_split = _split_tokens(seen, rule)
    begin = (unit % rule.SPLITS) * per_split + (kv_len - seen)
    end = tl.minimum(begin + per_split, kv_len)
    first_head = queries.q_ptr + (request.to(tl.int64) * queries.q_stride + kv_head * GROUP * WIDTH)
    q, q_rest = load_q(first_head, in_group[:, None] * WIDTH, mask_h, pages)
    best = tl.full([queries.TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([queries.TILE_ROWS], tl.float32)
    if queries.sinks_ptr is not None:  # noqa: SIM102 (known when compiled); in the first split, which every request has
        if unit % rule.SPLITS == 0:
            sinks_ptr = queries.sinks_ptr + kv_head * GROUP
            best = tl.load(sinks_ptr + in_group, mask=mask_h, other=0.0) * KERNEL_LOG2_E
            total += 1.0
    acc = tl.zeros([queries.TILE_ROWS, pages.TILE_DIM], tl.float32)
    table = queries.table_ptr + tl.load(queries.slots_ptr + request) * queries.table_stride
    kv_slots, path_start = _path_of(request, paths)
    sums = tl.zeros([queries.TILE_ROWS, rule.BLOCK], tl.float32)  # by index in a block: added up after the loop
    for at in range(begin, end, rule.BLOCK):
        token = at + tl.arange(0, rule.BLOCK)
        # past the end the last token, whose V is finite: its weight is 0
        there = tl.minimum(token, end - 1)
        if paths.starts_ptr is not None:
            kv_slot = tl.load(kv_slots + there, mask=there >= path_start, other=0)
            there = tl.where(there < path_start, there, kv_slot)
        start = row_starts(there, kv_head, table, pages)
        scores, _ = block_scores(q, q_rest, start, pages)
        scores = tl.where((token < end)[None, :], scores, float("-inf"))
        best_now = tl.maximum(best, tl.max(scores, 1))
        factor = tl.exp2(best - best_now)
        weights = tl.exp2(scores - best_now[:, None])
        v = block_values(start, pages)
        acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=pages.PRECISION)
        if queries.sinks_ptr is not None:
            total = total * factor
        sums = sums * factor[:, None] + weights
        best = best_now
    total += tl.sum(sums, 1)
    return best, total, acc / total[:, None]


@triton.jit
def _finish_split(unit, kv_head, used, attended, work, to, num_merges):
    """Store a request's only split, or a part and, behind the last one, that this program merges.

    Return the number of this program's merges.
    """
    GROUP: tl.constexpr = to.HEADS // to.KV_HEADS
    best, total, acc = attended
    request, in_group, dims = unit // to.SPLITS, tl.arange(0, to.TILE_HEADS), tl.arange(0, to.TILE_DIM)
    mask_h = in_group < GROUP
    mask_hd = mask_h[:, None] & (dims < to.DIM)[None, :]
    in_heads = in_group[:, None] * to.DIM + dims[None, :]
    if used == 1:
        row = request.to(tl.int64) * to.HEADS + kv_head * GROUP
        tl.store(to.out_ptr + row * to.DIM + in_heads, acc.to(to.out_ptr.dtype.element_ty), mask=mask_hd)
    else:
        part = unit.to(tl.int64) * to.HEADS + kv_head * GROUP
        tl.store(to.part_ptr + part * to.DIM + in_heads, acc, mask=mask_hd)
        tl.store(to.lse_ptr + part + in_group, best + tl.log2(total), mask=mask_h)
        group = request * to.KV_HEADS + kv_head
        tl.debug_barrier()  # all threads store before one counts
        if tl.atomic_add(work.done_ptr + group, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(work.done_ptr + group, 0)
            tl.store(work.merges_ptr + tl.program_id(0) + num_merges * tl.num_programs(0), group)
            num_merges += 1
    return num_merges


@triton.jit
def _decode_splits(work, queries, pages, rule, paths, to):
    """Attend over this program's splits, then merge those of requests whose last split it ended."""
    total_work = tl.load(work.list_ptr + work.batch * rule.SPLITS) * pages.KV_HEADS
    num_merges = 0
    for at in range(tl.program_id(0), total_work, tl.num_programs(0)):
        unit = tl.load(work.list_ptr + at // pages.KV_HEADS)
        kv_head = at % pages.KV_HEADS
        kv_len = tl.load(queries.kv_lens_ptr + unit // rule.SPLITS)
        attended = _attend_split(unit, kv_head, kv_len, queries, pages, rule, paths)
        num_merges = _finish_split(unit, kv_head, _num_splits(kv_len, rule), attended, work, to, num_merges)
    tl.debug_barrier()  # one thread's stores become visible to all
    for i in range(0, num_merges):
        group = tl.load(work.merges_ptr + tl.program_id(0) + i * tl.num_programs(0))
        request, kv_head = group // pages.KV_HEADS, group % pages.KV_HEADS
        merge_splits(request, kv_head, _num_splits(tl.load(queries.kv_lens_ptr + request), rule), to)


@triton.jit(do_not_specialize=["batch", "table_stride", "path_stride"])
def decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    list_ptr,
    done_ptr,
    merges_ptr,
    table_ptr,
    slots_ptr,
    kv_lens_ptr,
    sinks_ptr,
    path_starts_ptr,
    path_places_ptr,
    batch,
    q_stride,
    table_stride,
    path_stride,
    page_grains,
    unit_grains,
    scale,
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
    REST: tl.constexpr,
    TILE_REST: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program i of n: every n-th (split, KV head), then the merges that it completes."""
    _decode_splits(
        _Work(list_ptr, batch, done_ptr, merges_ptr),
        Queries(q_ptr, q_stride, kv_lens_ptr, slots_ptr, table_ptr, table_stride, sinks_ptr, HEADS, TILE_HEADS),
        LayerPages(
            k_ptr, v_ptr, page_grains, unit_grains, scale, KV_HEADS, UNIT_HEADS, DIM, PAGE_SIZE, TILE_DIM,
            BLOCK, PRECISION, WINDOW, CAP, REST, TILE_REST, GRAIN, WIDE,
        ),
        _SplitRule(BLOCK, MIN_SPLIT, SPLITS, WINDOW),
        _Paths(path_starts_ptr, path_places_ptr, path_stride),
        SplitOutputs(
            out_ptr, part_ptr, lse_ptr, HEADS, KV_HEADS, DIM, TILE_HEADS, TILE_GROUP, TILE_DIM, SPLITS, AT_ONCE
        ),
    )  # fmt: skip


class Grains(NamedTuple):
    """Unit for offsets: `size` elements, a divisor of rows and strides; `wide` exceeds 32 bits."""

    size: int
    wide: bool = False


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
    """Compile-time constants for K and V; `rest` counts K's elements after V."""
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


class PagedLayer(NamedTuple):
    """A layer's K and V, unit 0 of KVPool.k and KVPool.v, found by `page_table` int32[slots, pages].

    `rest`: latents' elements of q and K after V's.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    softmax: Softmax
    units: Units = ONE_UNIT
    window: int = 0
    rest: int = 0

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2] * self.units.count

    @property
    def masking(self) -> dict[str, Any]:
        return {"window": self.window, "cap": self.softmax.cap}

    def arguments(self, *, heads: int, kv_heads: int, dim: int) -> tuple[tuple[int, int, float], dict[str, Any]]:
        """Return a kernel's page_grains, unit_grains and scale, and its `cache_constants`."""
        pages, (units, unit_stride) = self.k.stride(0), self.units
        size = gcd(pages, unit_stride, dim, self.rest)
        grains = Grains(size, wide=self.k.shape[0] * (pages // size) >= 1 << 31)
        constants = cache_constants(
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            page_size=self.k.shape[1],
            dtype=self.k.dtype,
            units=units,
            rest=self.rest,
            grains=grains,
        )
        return (pages // size, unit_stride // size, self.softmax.scale * LOG2_E), constants


def split_constants(cache: dict[str, Any], tiles: DecodeTiles, *, window: int = 0, cap: float = 0.0) -> dict[str, Any]:
    group = triton.next_power_of_2(cache["HEADS"] // cache["KV_HEADS"])
    at_once = max(1, min(MERGED_AT_ONCE, MERGED_ELEMENTS // (group * cache["TILE_DIM"])))
    heads = {"TILE_HEADS": max(MIN_TILE_HEADS, group), "TILE_GROUP": group}
    return {**cache, **heads, "AT_ONCE": at_once, **split_rule(tiles), "WINDOW": window, "CAP": cap}


def split_options(tiles: DecodeTiles) -> dict[str, int]:
    """Without `maxnreg`, ptxas assumes more programs than launched, and spills."""
    registers = min(MAX_REGISTERS, REGISTERS // (32 * tiles.warps * tiles.per_sm) // 8 * 8)
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
    """Splits as request * splits + split, then their count: int32[B * splits + 1].

    `done` int32[B, kv_heads] counts finished ones.
    """

    units: torch.Tensor
    done: torch.Tensor


def split_list(kv_lens: torch.Tensor, *, kv_heads: int, tiles: DecodeTiles, window: int = 0) -> SplitList:
    """List splits of `kv_lens` int32[B], once per step for sequential layers."""
    batch = len(kv_lens)
    units = torch.empty((batch * tiles.splits + 1,), dtype=torch.int32, device=kv_lens.device)
    done = torch.empty((batch, kv_heads), dtype=torch.int32, device=kv_lens.device)
    constants = list_constants(kv_heads=kv_heads, tiles=tiles, window=window)
    split_list_kernel[(batch,)](kv_lens, units, done, batch, **constants, num_warps=1)
    return SplitList(units, done)


def decode(
    q: torch.Tensor,
    layer: PagedLayer,
    *,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    splits: SplitList,
    tiles: DecodeTiles,
    paths: TreePaths | None = None,
) -> torch.Tensor:
    """Return dense [B, heads, dim] for q [B, heads, dim] in the cache's dtype; rows may be strided.

    slots int64[B]; kv_lens int32[B]; `splits` are `split_list` of these.
    """
    batch, heads, width = q.shape
    dim, kv_heads = width - layer.rest, head_tiles(heads) if layer.rest else layer.kv_heads
    strides, cache = layer.arguments(heads=heads, kv_heads=kv_heads, dim=dim)
    parts = torch.empty((batch, tiles.splits, heads, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, tiles.splits, heads), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=q.device)
    merges = torch.empty((batch * tiles.splits * kv_heads,), dtype=torch.int32, device=q.device)
    programs = min(multiprocessors(q.device) * tiles.per_sm, batch * kv_heads * tiles.splits)
    decode_split_kernel[(programs,)](
        q,
        layer.k,
        layer.v,
        out,
        parts,
        lse,
        splits.units,
        splits.done,
        merges,
        layer.page_table,
        slots,
        kv_lens,
        layer.softmax.sinks,
        *((None, None) if paths is None else (paths.starts, paths.places)),
        batch,
        q.stride(0),
        layer.page_table.stride(0),
        None if paths is None else paths.places.stride(0),
        *strides,
        **split_constants(cache, tiles, **layer.masking),
        **split_options(tiles),
    )
    return out
