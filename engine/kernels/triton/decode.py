# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Paged decode attention for GPUs: partial softmax over chunks of a context, folded in order.

Flash-Decoding (Dao et al. 2023); tiles of all query heads of a KV head read K and V once.

A request's length alone decides its chunks, which fold from left to right, in any split of the
work: a row's bits depend on no batch or division.

The program that stores the last part of a request and KV head merges, and resets the count. A
barrier orders stores before one thread's atomic, which releases them and acquires earlier parts
(PTX ISA, "Memory Consistency Model").

`split_list` divides a step on the device, so one graph serves every length.

MLA latents: a row per token, V is K's first DIM elements, REST follow; a "KV head" is a tile of
query heads. V is loaded again, as the pipeliner prefetches nothing used in two products.

A window layer has its own list of visible chunks. Sinks are initial scores of the first. Windows,
sinks, caps and latents have not run on a GPU.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.paged_attention import Softmax
from engine.kernels.tape import sm_limit
from engine.kernels.triton.paged_tiles import (
    KERNEL_LOG2_E,
    LOG2_E,
    LayerPages,
    Queries,
    block_scores,
    block_values,
    load_q,
    row_starts,
    value_weights,
)
from engine.kv.kv_pool import ONE_UNIT, Units
from engine.kv.step_batch import TreePaths

MIN_TILE_HEADS = 16  # minimum of tl.dot
LIST_TILE = 256  # requests per read of a split list program
RECORD = tl.constexpr(8)  # int32 of a split: one sector of memory
MERGED_AT_ONCE, MERGED_ELEMENTS = 8, 16384  # parts in flight, and elements of theirs in shared memory
REGISTERS, MAX_REGISTERS = 65536, 255  # per multiprocessor, per thread
INTERPRETED_PROGRAMS = 3  # no device to query: few, so that each has several splits


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Sizes of tiles.

    - chunk: fewest tokens of a chunk; long contexts have `chunks` longer ones
    - block: tokens of a tile; per_sm: programs per multiprocessor
    - stages: page ids load before K and V, so the pipeliner is one tile ahead with 3, two with 5
    """

    chunk: int = 128
    chunks: int = 64
    block: int = 64
    warps: int = 4
    stages: int = 5
    per_sm: int = 3


@cache
def decode_tiles(*, kv_heads: int, dim: int, dtype: torch.dtype, codes: bool = False) -> DecodeTiles:
    """Return tiles for sm_90's registers (tests compile it), which also widen `codes`.

    Few KV heads need more chunks, or one long request leaves multiprocessors idle.
    """
    if codes and dtype != torch.float32:
        plain = decode_tiles(kv_heads=kv_heads, dim=dim, dtype=dtype)
        return replace(plain, block=32, per_sm=2 if dim > 64 else plain.per_sm)
    chunks = min(64, max(16, 512 // triton.next_power_of_2(kv_heads)))
    if dtype == torch.float32:
        return DecodeTiles(
            chunks=chunks, warps=8 if dim > 128 else 4, stages=3, block=64 if dim <= 128 else 32, per_sm=1
        )
    if dim > 128:
        return DecodeTiles(chunks=chunks, stages=3, per_sm=2)
    return DecodeTiles(chunks=chunks) if dim > 64 else DecodeTiles(chunks=chunks, warps=2, stages=3, per_sm=4)


def head_tiles(heads: int) -> int:
    return heads // max(n for n in range(1, MIN_TILE_HEADS + 1) if heads % n == 0)


@cache
def latent_decode_tiles(*, tiles_of_heads: int, dtype: torch.dtype, codes: bool = False) -> DecodeTiles:
    """Return tiles for latents: few chunks with many heads, since parts are large."""
    chunks = min(64, max(8, 128 // triton.next_power_of_2(tiles_of_heads)))
    if dtype == torch.float32:
        return DecodeTiles(chunks=chunks, warps=8, stages=1, block=16, per_sm=1)
    return DecodeTiles(chunks=chunks, warps=8, stages=3 if codes else 5, block=32, per_sm=1)


class _ChunkRule(NamedTuple):
    BLOCK: Any
    CHUNK: Any
    CHUNKS: Any
    WINDOW: Any


class _Work(NamedTuple):
    list_ptr: Any  # [B * chunks + 1, RECORD] int32: see SplitList
    last: Any  # the row that says how many there are
    done_ptr: Any  # [B, kv_heads] int32: parts there, 0 before and after
    merges_ptr: Any  # [B * chunks * kv_heads] int32: split * kv_heads + kv head; program i of n: each n-th from i


class _Split(NamedTuple):
    request: Any
    slot: Any  # row of the page table
    begin: Any  # tokens
    end: Any
    chunk: Any
    part: Any  # its first
    first_part: Any  # of the request
    parts: Any  # of the request; 0: this split is all of it


class _Paths(NamedTuple):
    """KV slots of tokens that do not lie at their positions, see TreePaths."""

    starts_ptr: Any  # [B] int32; None: all tokens lie at their positions
    places_ptr: Any  # [B, stride] int32
    stride: Any


class SplitOutputs(NamedTuple):
    out_ptr: Any  # [B, heads, dim] dense
    part_ptr: Any  # [parts, heads, dim] fp32: outputs times sums of weights
    sums_ptr: Any  # [parts, heads, 2] fp32: best score and sum of weights
    HEADS: Any
    KV_HEADS: Any
    DIM: Any
    TILE_HEADS: Any
    TILE_GROUP: Any
    TILE_DIM: Any
    AT_ONCE: Any  # parts in flight of a merge


@triton.jit
def _seen_tokens(kv_len, rule):
    seen = kv_len
    if rule.WINDOW:
        seen = tl.minimum(kv_len, rule.WINDOW)
    return seen


@triton.jit
def _chunk_tokens(seen, rule):
    """Tokens per chunk of `seen` ones, a multiple of BLOCK."""
    per_chunk = tl.cdiv(tl.cdiv(seen, rule.CHUNKS), rule.BLOCK) * rule.BLOCK
    return tl.maximum(per_chunk, rule.CHUNK)


@triton.jit
def _division(kv_len, per_split, rule):
    """Return chunks per split, splits and parts; `per_split` tokens are wanted."""
    seen = _seen_tokens(kv_len, rule)
    chunks = tl.cdiv(seen, _chunk_tokens(seen, rule))
    wanted = tl.maximum((seen + per_split // 2) // per_split, 1)
    run = tl.maximum(tl.cdiv(chunks, wanted), 1)
    splits = tl.cdiv(chunks, run)
    return run, splits, tl.where(splits > 1, chunks - run + 1, 0)


@triton.jit(do_not_specialize=["batch"])
def split_list_kernel(
    kv_lens_ptr,  # int32[B]
    slots_ptr,  # int64[B]
    list_ptr,  # int32[B * CHUNKS + 1, RECORD]
    done_ptr,  # int32[B, KV_HEADS]
    batch,
    PER_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_KV_HEADS: tl.constexpr,
    TILE_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (request): list its splits after earlier requests', about PER_HEAD in all."""
    request = tl.program_id(0)
    rule = _ChunkRule(BLOCK, CHUNK, CHUNKS, WINDOW)
    total = tl.zeros([TILE_BATCH], tl.int32)
    for start in range(0, batch, TILE_BATCH):
        at = start + tl.arange(0, TILE_BATCH)
        total += _seen_tokens(tl.load(kv_lens_ptr + at, mask=at < batch, other=0), rule)
    per_split = tl.maximum(tl.sum(total) // PER_HEAD, 1)
    splits_before = tl.zeros([TILE_BATCH], tl.int32)
    parts_before = tl.zeros([TILE_BATCH], tl.int32)
    for start in range(0, request, TILE_BATCH):
        at = start + tl.arange(0, TILE_BATCH)
        _, splits, parts = _division(tl.load(kv_lens_ptr + at, mask=at < request, other=0), per_split, rule)
        splits_before += splits
        parts_before += parts
    first_split, first_part = tl.sum(splits_before), tl.sum(parts_before)
    kv_len = tl.load(kv_lens_ptr + request)
    seen = _seen_tokens(kv_len, rule)
    chunk = _chunk_tokens(seen, rule)
    run, splits, parts = _division(kv_len, per_split, rule)
    split = tl.arange(0, CHUNKS)
    begin = kv_len - seen + split * (run * chunk)
    record, there = list_ptr + (first_split + split) * RECORD, split < splits
    tl.store(record, request, mask=there)
    tl.store(record + 1, tl.load(slots_ptr + request).to(tl.int32), mask=there)
    tl.store(record + 2, begin, mask=there)
    tl.store(record + 3, tl.minimum(begin + run * chunk, kv_len), mask=there)
    tl.store(record + 4, chunk, mask=there)
    tl.store(record + 5, first_part + tl.maximum((split - 1) * run + 1, 0), mask=there)
    tl.store(record + 6, first_part, mask=there)
    tl.store(record + 7, parts, mask=there)
    if request == batch - 1:
        tl.store(list_ptr + batch * (CHUNKS * RECORD), first_split + splits)
    kv_head = tl.arange(0, TILE_KV_HEADS)
    tl.store(done_ptr + request * KV_HEADS + kv_head, tl.zeros([TILE_KV_HEADS], tl.int32), mask=kv_head < KV_HEADS)


@triton.jit
def _split_at(at, work):
    record = work.list_ptr + at * RECORD
    return _Split(
        tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3),
        tl.load(record + 4), tl.load(record + 5), tl.load(record + 6), tl.load(record + 7),
    )  # fmt: skip


@triton.jit
def _nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """A best score and output that keep a chunk's bits: -0 keeps signs of zeros."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS, DIM], -0.0, tl.float32)


@triton.jit
def _folded(best, total, acc, more_best, more_total, more_acc):
    """Fold a chunk into a state. Explicit `fma`: registers and merges round alike."""
    best_now = tl.maximum(best, more_best)
    factor, more = tl.exp2(best - best_now), tl.exp2(more_best - best_now)
    total = tl.fma(total, factor, more_total * more)
    acc = tl.fma(acc, factor[:, None], more_acc * more[:, None])
    return best_now, total, acc


@triton.jit
def _store_part(part, kv_head, best, total, acc, to):
    GROUP: tl.constexpr = to.HEADS // to.KV_HEADS
    in_group, dims = tl.arange(0, to.TILE_HEADS), tl.arange(0, to.TILE_DIM)
    mask_h = in_group < GROUP
    row = part.to(tl.int64) * to.HEADS + kv_head * GROUP
    in_rows = in_group[:, None] * to.DIM + dims[None, :]
    tl.store(to.part_ptr + row * to.DIM + in_rows, acc, mask=mask_h[:, None] & (dims < to.DIM)[None, :])
    tl.store(to.sums_ptr + row * 2 + in_group * 2, best, mask=mask_h)
    tl.store(to.sums_ptr + row * 2 + (in_group * 2 + 1), total, mask=mask_h)


@triton.jit
def _store_out(request, kv_head, total, acc, to, TILE: tl.constexpr):
    GROUP: tl.constexpr = to.HEADS // to.KV_HEADS
    in_group, dims = tl.arange(0, TILE), tl.arange(0, to.TILE_DIM)
    row = request.to(tl.int64) * to.HEADS + kv_head * GROUP
    in_rows = in_group[:, None] * to.DIM + dims[None, :]
    out = (acc * tl.div_rn(1.0, total)[:, None]).to(to.out_ptr.dtype.element_ty)
    tl.store(to.out_ptr + row * to.DIM + in_rows, out, mask=(in_group < GROUP)[:, None] & (dims < to.DIM)[None, :])


@triton.jit
def _merge_parts(split, kv_head, to):
    GROUP: tl.constexpr = to.HEADS // to.KV_HEADS
    in_group, dims = tl.arange(0, to.TILE_GROUP), tl.arange(0, to.TILE_DIM)
    mask_h = in_group < GROUP
    mask = mask_h[:, None] & (dims < to.DIM)[None, :]
    row = split.first_part.to(tl.int64) * to.HEADS + kv_head * GROUP
    sums_ptr = to.sums_ptr + row * 2 + in_group * 2
    part_ptr = to.part_ptr + row * to.DIM + (in_group[:, None] * to.DIM + dims[None, :])
    best, acc = _nothing(to.TILE_GROUP, to.TILE_DIM)
    total = tl.zeros([to.TILE_GROUP], tl.float32)
    for part in tl.range(0, split.parts, num_stages=to.AT_ONCE):
        more_best = tl.load(sums_ptr + part * (2 * to.HEADS), mask=mask_h, other=0.0)
        more_total = tl.load(sums_ptr + part * (2 * to.HEADS) + 1, mask=mask_h, other=1.0)
        more_acc = tl.load(part_ptr + part * (to.HEADS * to.DIM), mask=mask, other=0.0)
        best, total, acc = _folded(best, total, acc, more_best, more_total, more_acc)
    _store_out(split.request, kv_head, total, acc, to, to.TILE_GROUP)


@triton.jit
def _path_of(request, paths):
    """A request's KV slots by token, and the first token that has one; 0 and 0 without paths."""
    kv_slots, first = 0, 0
    if paths.starts_ptr is not None:
        first = tl.load(paths.starts_ptr + request)
        kv_slots = paths.places_ptr + (request.to(tl.int64) * paths.stride - first)
    return kv_slots, first


@triton.jit
def _attend_chunks(split, kv_head, queries, pages, paths):
    """Return best score, sum of weights and output times this sum: folded chunks."""
    GROUP: tl.constexpr = queries.HEADS // pages.KV_HEADS
    WIDTH: tl.constexpr = pages.DIM + pages.REST
    in_group = tl.arange(0, queries.TILE_ROWS)
    mask_h = in_group < GROUP
    first_head = queries.q_ptr + (split.request.to(tl.int64) * queries.q_stride + kv_head * GROUP * WIDTH)
    q, q_rest = load_q(first_head, in_group[:, None] * WIDTH, mask_h, pages)
    best, acc = _nothing(queries.TILE_ROWS, pages.TILE_DIM)
    total = tl.zeros([queries.TILE_ROWS], tl.float32)
    if queries.sinks_ptr is not None:  # noqa: SIM102 (known when compiled)
        if split.part == split.first_part:
            best = tl.load(queries.sinks_ptr + kv_head * GROUP + in_group, mask=mask_h, other=0.0) * KERNEL_LOG2_E
            total += 1.0
    table = queries.table_ptr + split.slot.to(tl.int64) * queries.table_stride
    kv_slots, path_start = _path_of(split.request, paths)
    chunk_best, chunk_acc = _nothing(queries.TILE_ROWS, pages.TILE_DIM)
    sums = tl.zeros([queries.TILE_ROWS, pages.BLOCK], tl.float32)  # by index in a block: added up behind a chunk
    chunk_end = split.begin + split.chunk
    for at in range(split.begin, split.end, pages.BLOCK):
        token = at + tl.arange(0, pages.BLOCK)
        # past the end the last token, whose V is finite: its weight is 0
        there = tl.minimum(token, split.end - 1)
        if paths.starts_ptr is not None:
            kv_slot = tl.load(kv_slots + there, mask=there >= path_start, other=0)
            there = tl.where(there < path_start, there, kv_slot)
        start = row_starts(there, kv_head, table, pages)
        scores, _ = block_scores(q, q_rest, start, kv_head, pages)
        scores = tl.where((token < split.end)[None, :], scores, float("-inf"))
        best_now = tl.maximum(chunk_best, tl.max(scores, 1))
        factor = tl.exp2(chunk_best - best_now)
        weights = tl.exp2(scores - best_now[:, None])
        v, of_v = block_values(start, q.dtype, pages), value_weights(weights, start, kv_head, q.dtype, pages)
        chunk_acc = chunk_acc * factor[:, None] + tl.dot(of_v, v, input_precision=pages.PRECISION)
        sums = sums * factor[:, None] + weights
        chunk_best = best_now
        if at + pages.BLOCK >= tl.minimum(chunk_end, split.end):
            best, total, acc = _folded(best, total, acc, chunk_best, tl.sum(sums, 1), chunk_acc)
            chunk_best, chunk_acc = _nothing(queries.TILE_ROWS, pages.TILE_DIM)
            sums = tl.zeros([queries.TILE_ROWS, pages.BLOCK], tl.float32)
            chunk_end += split.chunk
    return best, total, acc


@triton.jit
def _attend_split(split, kv_head, queries, pages, paths, to):
    step = split.chunk
    if split.part == split.first_part:
        step = split.end - split.begin
    count = tl.cdiv(split.end - split.begin, step)
    for i in range(0, count):
        begin, part = split.begin + i * step, split.part + i
        end = tl.minimum(begin + step, split.end)
        run = _Split(split.request, split.slot, begin, end, split.chunk, part, split.first_part, split.parts)
        best, total, acc = _attend_chunks(run, kv_head, queries, pages, paths)
        if split.parts == 0:
            _store_out(split.request, kv_head, total, acc, to, to.TILE_HEADS)
        else:
            _store_part(part, kv_head, best, total, acc, to)
    return count


@triton.jit
def _decode_splits(work, queries, pages, paths, to):
    total_work = tl.load(work.list_ptr + work.last * RECORD) * pages.KV_HEADS
    merges_ptr = work.merges_ptr + tl.program_id(0)
    num_merges = 0
    for at in range(tl.program_id(0), total_work, tl.num_programs(0)):
        split, kv_head = _split_at(at // pages.KV_HEADS, work), at % pages.KV_HEADS
        count = _attend_split(split, kv_head, queries, pages, paths, to)
        if split.parts > 0:
            done_ptr = work.done_ptr + split.request * pages.KV_HEADS + kv_head
            tl.debug_barrier()  # all threads store before one counts
            if tl.atomic_add(done_ptr, count, sem="acq_rel", scope="gpu") + count == split.parts:
                tl.store(done_ptr, 0)
                tl.store(merges_ptr + num_merges * tl.num_programs(0), at)
                num_merges += 1
    tl.debug_barrier()  # one thread's stores become visible to all
    for i in range(0, num_merges):
        at = tl.load(merges_ptr + i * tl.num_programs(0))
        _merge_parts(_split_at(at // pages.KV_HEADS, work), at % pages.KV_HEADS, to)


@triton.jit(do_not_specialize=["batch", "table_stride", "path_stride"])
def decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    sums_ptr,
    list_ptr,
    done_ptr,
    merges_ptr,
    table_ptr,
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
    CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    REST: tl.constexpr,
    TILE_REST: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program i of n: every n-th (split, KV head), then merges."""
    _decode_splits(
        _Work(list_ptr, batch * CHUNKS, done_ptr, merges_ptr),
        Queries(q_ptr, q_stride, None, None, table_ptr, table_stride, sinks_ptr, HEADS, TILE_HEADS),
        LayerPages(
            k_ptr, v_ptr, page_grains, unit_grains, scale, KV_HEADS, UNIT_HEADS, DIM, PAGE_SIZE, TILE_DIM,
            BLOCK, PRECISION, WINDOW, CAP, REST, TILE_REST, EXPONENTS, GRAIN, WIDE,
        ),
        _Paths(path_starts_ptr, path_places_ptr, path_stride),
        SplitOutputs(out_ptr, part_ptr, sums_ptr, HEADS, KV_HEADS, DIM, TILE_HEADS, TILE_GROUP, TILE_DIM, AT_ONCE),
    )  # fmt: skip


def cache_constants(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    units: int = 1,
    rest: int = 0,
    exponents: int = 0,
) -> dict[str, Any]:
    """Compile-time constants for K and V; `rest` counts K's elements after V, `dtype` is q's.

    GRAIN, the unit for offsets, is a divisor of rows and strides. WIDE: these exceed 32 bits.
    """
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
        "EXPONENTS": exponents,
        "GRAIN": gcd(dim, rest, exponents),
        "WIDE": False,
    }


class PagedLayer(NamedTuple):
    """A layer's K and V, unit 0 of KVPool.k and KVPool.v, by `page_table` int32[slots, pages].

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

    @property
    def exponents(self) -> int:
        """Bytes behind a token's codes in a unit; 0: K and V are no codes."""
        return self.k.stride(1) - self.k.shape[2] * self.k.shape[3]

    def arguments(
        self, *, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, int, float], dict[str, Any]]:
        """Return a kernel's page_grains, unit_grains and scale, and its `cache_constants`."""
        pages, (units, unit_stride) = self.k.stride(0), self.units
        size = gcd(pages, unit_stride, dim, self.rest, self.exponents)
        constants = cache_constants(
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            page_size=self.k.shape[1],
            dtype=dtype,
            units=units,
            rest=self.rest,
            exponents=self.exponents,
        )
        constants |= {"GRAIN": size, "WIDE": self.k.shape[0] * (pages // size) >= 1 << 31}
        return (pages // size, unit_stride // size, self.softmax.scale * LOG2_E), constants


def split_constants(cache: dict[str, Any], tiles: DecodeTiles, *, window: int = 0, cap: float = 0.0) -> dict[str, Any]:
    group = triton.next_power_of_2(cache["HEADS"] // cache["KV_HEADS"])
    at_once = max(1, min(MERGED_AT_ONCE, MERGED_ELEMENTS // (group * cache["TILE_DIM"])))
    heads = {"TILE_HEADS": max(MIN_TILE_HEADS, group), "TILE_GROUP": group}
    work = {"BLOCK": tiles.block, "CHUNKS": tiles.chunks, "AT_ONCE": at_once}
    return {**cache, **heads, **work, "WINDOW": window, "CAP": cap}


def split_options(tiles: DecodeTiles) -> dict[str, int]:
    """Without `maxnreg`, ptxas assumes more programs than launched, and spills."""
    registers = min(MAX_REGISTERS, REGISTERS // (32 * tiles.warps * tiles.per_sm) // 8 * 8)
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": registers}


def list_constants(*, kv_heads: int, tiles: DecodeTiles, per_head: int, window: int = 0) -> dict[str, Any]:
    heads = {"PER_HEAD": per_head, "KV_HEADS": kv_heads, "TILE_KV_HEADS": triton.next_power_of_2(kv_heads)}
    rule = {"BLOCK": tiles.block, "CHUNK": tiles.chunk, "CHUNKS": tiles.chunks, "WINDOW": window}
    return {**heads, "TILE_BATCH": LIST_TILE, **rule}


def tile_dim(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def multiprocessors(device: torch.device) -> int:
    return sm_limit() or _multiprocessors_of(device)


@cache
def _multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class SplitList:
    """Any division of a step's requests into runs of chunks.

    - records: int32[B * chunks + 1, RECORD]: rows of `_Split`, then their count
    - done: int32[B, kv_heads]: stored parts; parts: most per head
    """

    records: torch.Tensor
    done: torch.Tensor
    parts: int


def _programs_of_head(kv_heads: int, tiles: DecodeTiles, device: torch.device) -> int:
    return max(1, multiprocessors(device) * tiles.per_sm // kv_heads)


def parts_bytes(batch: int, *, heads: int, kv_heads: int, dim: int, tiles: DecodeTiles, device: torch.device) -> int:
    """Bytes of a layer's parts and sums, whatever the lengths (`decode`)."""
    parts = min(batch, _programs_of_head(kv_heads, tiles, device)) * tiles.chunks
    return torch.float32.itemsize * parts * heads * (dim + 2)


def split_list(
    kv_lens: torch.Tensor, slots: torch.Tensor, *, kv_heads: int, tiles: DecodeTiles, window: int = 0
) -> SplitList:
    """Divide kv_lens int32[B], slots int64[B], once per step for sequential layers.

    Splits are as long as a program's share: whole requests of large steps, single chunks of small
    ones. At most `per_head` requests exceed that share, others leave no parts.
    """
    batch, device = len(kv_lens), kv_lens.device
    per_head = _programs_of_head(kv_heads, tiles, device)
    records = torch.empty((batch * tiles.chunks + 1, RECORD.value), dtype=torch.int32, device=device)
    done = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    constants = list_constants(kv_heads=kv_heads, tiles=tiles, per_head=per_head, window=window)
    split_list_kernel[(batch,)](kv_lens, slots, records, done, batch, **constants, num_warps=1)
    return SplitList(records, done, min(batch, per_head) * tiles.chunks)


def decode(
    q: torch.Tensor, layer: PagedLayer, *, splits: SplitList, tiles: DecodeTiles, paths: TreePaths | None = None
) -> torch.Tensor:
    """Return dense [B, heads, dim] for q [B, heads, dim], maybe strided.

    q is in the cache's dtype, or the cache has codes.
    """
    batch, heads, width = q.shape
    dim, kv_heads = width - layer.rest, head_tiles(heads) if layer.rest else layer.kv_heads
    strides, cache = layer.arguments(heads=heads, kv_heads=kv_heads, dim=dim, dtype=q.dtype)
    parts = torch.empty((splits.parts, heads, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((splits.parts, heads, 2), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=q.device)
    merges = torch.empty((batch * tiles.chunks * kv_heads,), dtype=torch.int32, device=q.device)
    programs = min(multiprocessors(q.device) * tiles.per_sm, len(merges))
    decode_split_kernel[(programs,)](
        q,
        layer.k,
        layer.v,
        out,
        parts,
        sums,
        splits.records,
        splits.done,
        merges,
        layer.page_table,
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
