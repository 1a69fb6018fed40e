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
from engine.kv.kv_pool import ONE_UNIT, Units
from engine.kv.step_batch import TreePaths

MIN_TILE_HEADS = 16  # minimum of tl.dot
LOG2_E = 1.4426950408889634
KERNEL_LOG2_E = tl.constexpr(LOG2_E)
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


@triton.jit
def split_tokens(kv_len, MIN_SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens per split, a multiple of BLOCK."""
    per_split = tl.cdiv(tl.cdiv(kv_len, SPLITS), BLOCK) * BLOCK
    return tl.maximum(per_split, MIN_SPLIT)


@triton.jit
def seen_tokens(kv_len, WINDOW: tl.constexpr):
    """Number of visible tokens; WINDOW 0 is all."""
    seen = kv_len
    if WINDOW:
        seen = tl.minimum(kv_len, WINDOW)
    return seen


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(score / CAP) for scores times log2(e); exp2 saturates large ones to 1 or -1."""
    return CAP * KERNEL_LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / CAP)) + 1.0))


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
    """Merge a KV head's parts, AT_ONCE splits at a time."""
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
    """Offset of a KV head's row from page 0; `token` is in the page.

    Counted in grains, since 64-bit addresses were most of a step's instructions.
    """
    GRAINS: tl.constexpr = (DIM + REST) // GRAIN  # per row
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
    done_ptr,  # [B, kv_heads] int32: finished splits, 0 before and after
    merges_ptr,  # [B * splits * kv_heads] int32: request * kv_heads + kv head; program i of n owns every n-th from i
    table_ptr,  # [slots, table_stride] int32
    slots_ptr,  # [B] int64
    kv_lens_ptr,  # [B] int32
    sinks_ptr,  # [heads] fp32: a score per head without a value; None: no sinks
    path_starts_ptr,  # [B] int32: see TreePaths; None: all tokens lie at their positions
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
    REST: tl.constexpr,  # elements of K after V's, for latents; 0: separate K and V
    TILE_REST: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program i of n: every n-th (split, KV head), then the merges that it completes."""
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
        sums = tl.zeros([TILE_HEADS, BLOCK], tl.float32)  # by index in a block: threads add up once, after the loop
        for at in range(begin, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            # past the end the last token, whose V is finite: its weight is 0
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
            tl.debug_barrier()  # all threads store before one counts
            if tl.atomic_add(done_ptr + group, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(done_ptr + group, 0)
                tl.store(merges_ptr + tl.program_id(0) + num_merges * tl.num_programs(0), group)
                num_merges += 1
    tl.debug_barrier()  # one thread's stores become visible to all
    for i in range(0, num_merges):
        group = tl.load(merges_ptr + tl.program_id(0) + i * tl.num_programs(0))
        request, kv_head = group // KV_HEADS, group % KV_HEADS
        seen = seen_tokens(tl.load(kv_lens_ptr + request), WINDOW)
        used = tl.cdiv(seen, split_tokens(seen, MIN_SPLIT, SPLITS, BLOCK))
        merge_splits(
            part_ptr, lse_ptr, out_ptr, request, kv_head, used,
            HEADS, KV_HEADS, DIM, TILE_GROUP, TILE_DIM, SPLITS, AT_ONCE,
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
