"""Which rows of a step go through which adapter, as tiles for grouped kernels. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

NO_TILE = (0, 0, 0, 0)


class Run(NamedTuple):
    """Successive tokens `rows` of a step that compute with `adapter`."""

    adapter: int
    rows: slice


def adapter_runs(items: Iterable[tuple[int, int]]) -> list[Run]:
    """Join the neighbours of one adapter among `items`, (adapter, tokens) each; adapter 0 has no run."""
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
    """`rows`: rows that compute with adapters, adapter after adapter. `tiles`: (place, first of `rows`, how many, 0) each."""

    rows: list[int]
    tiles: list[tuple[int, int, int, int]]


def row_tiles(runs: Iterable[tuple[int, slice]], *, tile_rows: int) -> RowTiles:
    """Group `runs`, (place of an adapter, rows of the step) each, into tiles of at most `tile_rows` rows of one place."""
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
    """Return how many tiles `num_rows` rows of up to `places` adapters may need."""
    return num_rows // tile_rows + min(places, num_rows)
