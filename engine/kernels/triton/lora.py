# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""LoRA of all rows of a step in two GPU launches.

Rows are tiled by adapter. `shrink` computes x A^T in input splits, `expand` adds their sum times B
to y, without atomics, so bits repeat. A table has the weights' addresses by place and site. After
Punica's SGMV (arXiv:2310.18547) and vLLM's lora_shrink and lora_expand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

PARTS = 4  # maximum of matrices per site
FIELDS = 4  # per entry: address of A [rank, in], address of B [rank, rows], rank, padding; both dense
TILE_FIELDS = 4  # per tile: place in the table, first row, rows (0: no tile), padding
RANK_TILE = 16  # minimum of tensor cores
SPLIT_WIDTH = 1024  # minimum of inputs per split
MAX_SPLITS = 8
VECTOR_BYTES = 16  # a GPU's widest load


@dataclass(frozen=True, slots=True)
class LoraTiles:
    rows: int
    width: int
    columns: int
    warps: int
    stages: int


DECODE_TILES = LoraTiles(rows=16, width=256, columns=128, warps=4, stages=3)
EXTEND_TILES = LoraTiles(rows=64, width=64, columns=128, warps=4, stages=3)


@triton.jit(do_not_specialize=["total"])
def lora_shrink_kernel(
    x_ptr,  # [T, x_stride]: WIDTH elements of a row
    low_ptr,  # [SPLITS, total, parts * RANK] fp32
    table_ptr,  # [places, PLACE_STRIDE] int64, from this site's entries on
    tiles_ptr,  # [tiles, 4] int32
    rows_ptr,  # int32: rows of x by tile
    total,  # upper bound of the rows of all tiles
    x_stride,
    WIDTH: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACE_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    TILE_ROWS: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, split, part and ranks)."""
    SPAN: tl.constexpr = (WIDTH + SPLITS * TILE_WIDTH - 1) // (SPLITS * TILE_WIDTH) * TILE_WIDTH
    tile = tiles_ptr + tl.program_id(0) * 4
    count = tl.load(tile + 2)
    if count == 0:
        return
    split = tl.program_id(1)
    part = tl.program_id(2) // (RANK // TILE_RANK)
    rank_at = tl.program_id(2) % (RANK // TILE_RANK) * TILE_RANK
    entry = table_ptr + tl.load(tile) * PLACE_STRIDE + part * 4
    rank = tl.load(entry + 2)
    if rank_at >= rank:
        return
    a_ptr = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x_ptr.dtype.element_ty)), ALIGN)
    first = tl.load(tile + 1)
    in_tile = tl.arange(0, TILE_ROWS)
    mask_m = in_tile < count
    row = tl.load(rows_ptr + first + in_tile, mask=mask_m, other=0).to(tl.int64)
    ranks = rank_at + tl.arange(0, TILE_RANK)
    mask_r = ranks < rank
    acc = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
    for at in range(split * SPAN, tl.minimum(split * SPAN + SPAN, WIDTH), TILE_WIDTH):
        k = at + tl.arange(0, TILE_WIDTH)
        mask_k = k < WIDTH
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        a = tl.load(a_ptr + ranks[None, :] * WIDTH + k[:, None], mask=mask_r[None, :] & mask_k[:, None], other=0.0)
        acc += tl.dot(x, a, input_precision=PRECISION)
    at_low = (split * total + first + in_tile).to(tl.int64) * (NUM_PARTS * RANK) + part * RANK
    tl.store(low_ptr + at_low[:, None] + ranks[None, :], acc, mask=mask_m[:, None])


@triton.jit(do_not_specialize=["total"])
def lora_expand_kernel(
    low_ptr,  # as lora_shrink_kernel leaves it
    y_ptr,  # [T, y_stride]
    table_ptr,
    tiles_ptr,
    rows_ptr,
    total,
    y_stride,
    ROWS0: tl.constexpr,  # columns of y per part
    ROWS1: tl.constexpr,
    ROWS2: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACE_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, columns of one part)."""
    END0: tl.constexpr = (ROWS0 + TILE_COLUMNS - 1) // TILE_COLUMNS
    END1: tl.constexpr = END0 + (ROWS1 + TILE_COLUMNS - 1) // TILE_COLUMNS
    tile = tiles_ptr + tl.program_id(0) * 4
    count = tl.load(tile + 2)
    if count == 0:
        return
    block = tl.program_id(1)
    part = (block >= END0).to(tl.int32) + (block >= END1).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, ROWS0, ROWS0 + ROWS1))
    block -= tl.where(part == 0, 0, tl.where(part == 1, END0, END1))
    entry = table_ptr + tl.load(tile) * PLACE_STRIDE + part * 4
    rank = tl.load(entry + 2)
    if rank == 0:
        return
    b_ptr = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(y_ptr.dtype.element_ty)), ALIGN)
    size = tl.where(part == 0, ROWS0, tl.where(part == 1, ROWS1, ROWS2))
    first = tl.load(tile + 1)
    in_tile = tl.arange(0, TILE_ROWS)
    mask_m = in_tile < count
    row = tl.load(rows_ptr + first + in_tile, mask=mask_m, other=0).to(tl.int64)
    columns = block * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    mask_n = columns < size
    at_low = (first + in_tile).to(tl.int64) * (NUM_PARTS * RANK) + part * RANK
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for rank_at in range(0, rank, TILE_RANK):
        ranks = rank_at + tl.arange(0, TILE_RANK)
        mask_r = ranks < rank
        low = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
        for split in tl.static_range(SPLITS):
            at = low_ptr + (split * total).to(tl.int64) * (NUM_PARTS * RANK)
            low += tl.load(at + at_low[:, None] + ranks[None, :], mask=mask_m[:, None] & mask_r[None, :], other=0.0)
        b = tl.load(b_ptr + ranks[:, None] * size + columns[None, :], mask=mask_r[:, None] & mask_n[None, :], other=0.0)
        acc += tl.dot(low.to(y_ptr.dtype.element_ty), b, input_precision=PRECISION)
    target = y_ptr + row[:, None] * y_stride + (begin + columns)[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    y = tl.load(target, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)


def site_constants(*, width: int, rows: Sequence[int], sites: int, max_rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time constants for a site [sum of `rows`, width]."""
    assert 1 <= len(rows) < PARTS, rows
    aligned = all(size * dtype.itemsize % VECTOR_BYTES == 0 for size in (width, *rows))
    return {
        "NUM_PARTS": len(rows),
        "RANK": -(-max_rank // RANK_TILE) * RANK_TILE,
        "SPLITS": min(MAX_SPLITS, max(1, width // SPLIT_WIDTH)),
        "PLACE_STRIDE": sites * PARTS * FIELDS,
        "ALIGN": VECTOR_BYTES if aligned else dtype.itemsize,
        "TILE_RANK": RANK_TILE,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def shrink_constants(site: dict[str, Any], *, width: int, tiles: LoraTiles) -> dict[str, Any]:
    return {**site, "WIDTH": width, "TILE_ROWS": tiles.rows, "TILE_WIDTH": tiles.width}


def expand_constants(site: dict[str, Any], *, rows: Sequence[int], tiles: LoraTiles) -> dict[str, Any]:
    sizes = {f"ROWS{part}": rows[part] if part < len(rows) else 0 for part in range(PARTS - 1)}
    return {**site, **sizes, "TILE_ROWS": tiles.rows, "TILE_COLUMNS": tiles.columns}


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    table: torch.Tensor,
    tiles: torch.Tensor,
    rows: torch.Tensor,
    site: dict[str, Any],
    parts: Sequence[int],
    shape: LoraTiles,
) -> None:
    """Add the adapters' products of x [T, in] to y [T, out] in place.

    table int64[places, PARTS, FIELDS], a view of this site; tiles int32[tiles, TILE_FIELDS]; rows
    int32[n].
    """
    assert x.stride(1) == y.stride(1) == 1 and y.shape[1] == sum(parts), (x.stride(), y.shape)
    assert table.stride() == (site["PLACE_STRIDE"], FIELDS, 1), table.stride()
    total, num_parts, rank = min(len(x), len(rows)), site["NUM_PARTS"], site["RANK"]
    low = torch.empty((site["SPLITS"] * total, num_parts * rank), dtype=torch.float32, device=x.device)
    launch = {"num_warps": shape.warps, "num_stages": shape.stages}
    lora_shrink_kernel[(len(tiles), site["SPLITS"], num_parts * (rank // RANK_TILE))](
        x,
        low,
        table,
        tiles,
        rows,
        total,
        x.stride(0),
        **shrink_constants(site, width=x.shape[1], tiles=shape),
        **launch,
    )
    blocks = sum(triton.cdiv(size, shape.columns) for size in parts)
    lora_expand_kernel[(len(tiles), blocks)](
        low,
        y,
        table,
        tiles,
        rows,
        total,
        y.stride(0),
        **expand_constants(site, rows=parts, tiles=shape),
        **launch,
    )
