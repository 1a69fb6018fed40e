"""Rows of a step by adapter, as tiles for grouped kernels. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

NO_TILE = (0, 0, 0, 0)


class Run(NamedTuple):
    """Consecutive `rows` of a step with `adapter`."""

    adapter: int
    rows: slice


def adapter_runs(items: Iterable[tuple[int, int]]) -> list[Run]:
    """Merge neighbouring (adapter, tokens); skip adapter 0."""
    runs: list[Run] = []
    at = 0
    for adapter, count in items:
        start, at = at, at + count
        if adapter and runs and runs[-1].adapter == adapter and runs[-1].rows.stop == start:
            runs[-1] = Run(adapter, slice(runs[-1].rows.start, at))
        elif adapter:
            runs.append(Run(adapter, slice(start, at)))
    return runs


class RowTiles(NamedTuple):
    """Rows, by adapter, in `tiles`: (place, first index in `rows`, count, 0) each."""

    rows: list[int]
    tiles: list[tuple[int, int, int, int]]


def row_tiles(runs: Iterable[tuple[int, slice]], *, tile_rows: int) -> RowTiles:
    """Group (place, rows of the step) into tiles of at most `tile_rows` of one place."""
    by_place: dict[int, list[int]] = {}
    for place, rows in runs:
        by_place.setdefault(place, []).extend(range(rows.start, rows.stop))
    grouped, tiles = list[int](), list[tuple[int, int, int, int]]()
    for place, of_place in sorted(by_place.items()):
        for at in range(0, len(of_place), tile_rows):
            tiles.append((place, len(grouped) + at, min(tile_rows, len(of_place) - at), 0))
        grouped += of_place
    return RowTiles(grouped, tiles)


def most_tiles(num_rows: int, *, places: int, tile_rows: int) -> int:
    """Maximum for `num_rows` rows of up to `places` adapters."""
    return num_rows // tile_rows + min(places, num_rows)
