"""Rows of a step by adapter: each row with an adapter is in one tile, and no other row is."""

import random

from engine.lora.row_tiles import most_tiles, row_tiles


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
