"""LoRA by grouped Triton kernels (engine/kernels/triton/lora.py): two launches per site.

table  [places, sites, PARTS, FIELDS] int64: pointers to matrices of adapters, evicted LRU
tiles  rows and their places (bank.py), new in each step

Recorded steps read both from fixed memory, so they stay valid when adapters or rows change.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from engine.kernels.triton.lora import (
    DECODE_TILES,
    EXTEND_TILES,
    FIELDS,
    PARTS,
    TILE_FIELDS,
    LoraTiles,
    add_lora,
    site_constants,
)
from engine.kv.step_batch import upload, upload_into
from engine.layers.linear import Delta, SiteShape
from engine.lora.bank import NO_TILE, RowTiles, Run, max_tiles, row_tiles
from engine.lora.weights import AdapterWeights


@dataclass(frozen=True, slots=True)
class _Step:
    """Kernel inputs: `rows` [n] i32, `tiles` [tiles, TILE_FIELDS] i32."""

    rows: Tensor
    tiles: Tensor
    shape: LoraTiles


class GroupedAdapters:
    records = True

    def __init__(
        self,
        sites: Sequence[SiteShape],
        *,
        places: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rank = max_rank
        self._sites = list(sites)
        self._parts = [site.rows for site in sites]
        self._constants = [
            site_constants(width=site.width, rows=parts, sites=len(sites), max_rank=max_rank, dtype=dtype)
            for site, parts in zip(sites, self._parts, strict=True)
        ]
        self._table = torch.zeros((places, len(sites), PARTS, FIELDS), dtype=torch.int64, device=device)
        self._dtype = dtype
        self._entries: dict[int, Tensor] = {}  # adapter -> its row of the table
        self._places: OrderedDict[int, int] = OrderedDict()  # adapter -> place, LRU first
        self._free = list(range(places))
        self._max_recorded = 0  # rows
        self._recorded = torch.empty(0, dtype=torch.int32, device=device)  # inputs of recorded steps: rows, then tiles
        self._step: _Step | None = None

    def compile(self) -> None:
        device = self._table.device
        for index, site in enumerate(self._sites):
            x = torch.zeros((1, site.width), dtype=self._dtype, device=device)
            y = torch.zeros((1, sum(self._parts[index])), dtype=self._dtype, device=device)
            for shape in (DECODE_TILES, EXTEND_TILES):
                self._add(index, x, y, self._upload(RowTiles([0], [NO_TILE]), shape))

    def add(self, number: int, weights: AdapterWeights) -> None:
        assert weights.max_rank <= self.max_rank, (weights.max_rank, self.max_rank)
        entries = torch.zeros(self._table.shape[1:], dtype=torch.int64)
        for entry, site, sizes in zip(entries, weights.sites, self._parts, strict=True):
            starts = list(accumulate(sizes, initial=0))
            if site is not None:
                for columns, ranks, b in site.parts:
                    a = site.a[ranks]
                    entry[starts.index(columns.start)] = torch.tensor([a.data_ptr(), b.data_ptr(), len(a), 0])
        self._entries[number] = upload(entries, self._table.device)

    def remove(self, number: int) -> None:
        self._step = None
        del self._entries[number]
        if number in self._places:
            self._free.append(self._places.pop(number))

    def begin(self, runs: Sequence[Run], *, recorded: int | None) -> None:
        self._step = None
        if not runs:
            return
        self._find_places(list(dict.fromkeys(run.adapter for run in runs)))
        placed = [(self._places[run.adapter], run.rows) for run in runs]
        if recorded is not None:
            self._write_recorded(row_tiles(placed, tile_rows=DECODE_TILES.rows), recorded)
            self._step = self._recorded_step(recorded)
            return
        longest = max(run.rows.stop - run.rows.start for run in runs)
        shape = DECODE_TILES if longest <= DECODE_TILES.rows else EXTEND_TILES
        self._step = self._upload(row_tiles(placed, tile_rows=shape.rows), shape)

    def begin_recording(self, rows: int) -> None:
        """Call for the largest step first: others read the same memory."""
        if self._max_recorded == 0:
            self._max_recorded = -(-rows // 4) * 4  # aligns the tiles after them to 16 bytes
            self._recorded = self._recorded.new_empty(self._max_recorded + TILE_FIELDS * self._max_tiles(rows))
        assert rows <= self._max_recorded, (rows, self._max_recorded)
        self._recorded.zero_()  # recording computes, too: without tiles
        self._step = self._recorded_step(rows)

    def _recorded_step(self, rows: int) -> _Step:
        tiles = self._recorded[self._max_recorded :].view(-1, TILE_FIELDS)[: self._max_tiles(rows)]
        return _Step(self._recorded[: self._max_recorded], tiles, DECODE_TILES)

    def _max_tiles(self, rows: int) -> int:
        return max_tiles(rows, places=len(self._table), tile_rows=DECODE_TILES.rows)

    def delta(self, index: int) -> Delta:
        def delta(x: Tensor, y: Tensor) -> None:
            if self._step is None:
                return
            if y.dtype == x.dtype:
                self._add(index, x, y, self._step)
                return
            part = torch.zeros_like(y, dtype=x.dtype)  # y is unrounded sums; the kernels need one dtype
            self._add(index, x, part, self._step)
            y += part

        return delta

    def _add(self, index: int, x: Tensor, y: Tensor, step: _Step) -> None:
        add_lora(
            x,
            y,
            table=self._table[:, index],
            tiles=step.tiles,
            rows=step.rows,
            site=self._constants[index],
            parts=self._parts[index],
            shape=step.shape,
        )

    def _find_places(self, numbers: list[int]) -> None:
        """Assign in stream order: earlier steps still read them."""
        assert len(numbers) <= len(self._table), "more adapters in a step than places"
        for number in numbers:
            if number in self._places:
                self._places.move_to_end(number)
        for number in numbers:
            if number not in self._places:
                place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
                self._places[number] = place
                self._table[place].copy_(self._entries[number])

    def _write_recorded(self, step: RowTiles, rows: int) -> None:
        rows_padded = [*step.rows, *[0] * (self._max_recorded - len(step.rows))]
        tiles_padded = [*step.tiles, *[NO_TILE] * (self._max_tiles(rows) - len(step.tiles))]
        words = [*rows_padded, *chain.from_iterable(tiles_padded)]
        upload_into(self._recorded[: len(words)], torch.tensor(words, dtype=torch.int32))

    def _upload(self, step: RowTiles, shape: LoraTiles) -> _Step:
        device = self._table.device
        return _Step(
            upload(torch.tensor(step.rows, dtype=torch.int32), device),
            upload(torch.tensor(step.tiles, dtype=torch.int32), device),
            shape,
        )
