"""Rows of a step by adapter: each row with an adapter is in one tile, and no other row is."""

import random
from collections.abc import Sequence

from engine.core.plan import PlanItem, SlotOpen
from engine.lora.bank import AdapterBank, SlicedAdapters
from engine.lora.row_tiles import Run, most_tiles, row_tiles
from engine.sampling_params import SamplingParams


def test_tiles_cover_the_rows_of_each_adapter_and_no_other() -> None:
    rng = random.Random(0)
    for _ in range(300):
        places = [rng.randrange(4) for _ in range(rng.randrange(1, 50))]  # of each row; 0: none
        runs = [(place, slice(row, row + 1)) for row, place in enumerate(places) if place]
        rows, tiles = row_tiles(runs, tile_rows=16)
        covered = {}
        for place, first, count, _ in tiles:
            assert 1 <= count <= 16
            for row in rows[first : first + count]:
                assert row not in covered
                covered[row] = place
        assert covered == {row: place for row, place in enumerate(places) if place}
        assert len(tiles) <= most_tiles(len(places), places=3, tile_rows=16)


def test_runs_of_one_adapter_share_tiles() -> None:
    rows, tiles = row_tiles([(2, slice(4, 6)), (0, slice(6, 26)), (2, slice(30, 31))], tile_rows=16)
    assert rows == [*range(6, 26), 4, 5, 30]
    assert tiles == [(0, 0, 16, 0), (0, 16, 4, 0), (2, 20, 3, 0)]


def test_the_bound_is_reached() -> None:
    """Two adapters with one row beyond a tile each."""
    _, tiles = row_tiles([(0, slice(0, 17)), (1, slice(17, 34))], tile_rows=16)
    assert len(tiles) == most_tiles(34, places=2, tile_rows=16) == 4


class LastRuns(SlicedAdapters):
    def begin(self, runs: Sequence[Run], *, recorded: int | None) -> None:
        self.runs = list(runs)


def test_steps_of_other_weights_are_recorded_without_the_last_ones_rows() -> None:
    bank = AdapterBank(steps := LastRuns())
    bank.open(SlotOpen(slot=0, sampling=SamplingParams(), prompt_ids=[1], output_ids=[], eos_ids=(), adapter=1))
    item = PlanItem(
        rid="", slot=0, tokens=[1], start=0, page_start=0, new_pages=[], sample=True, output_len=0, extend=True
    )
    assert bank.begin([item])
    bank.compute()
    assert steps.runs
    bank.attach([])
    assert not steps.runs
