"""Which tokens of a step belong to which adapter. Pure."""

from collections.abc import Iterable

Runs = list[tuple[int, int]]  # [start, end) of the step's tokens, ascending, no two touch


def runs_by_adapter(items: Iterable[tuple[int, int]]) -> dict[int, Runs]:
    """`items`: (adapter, tokens), one after another. The runs of each adapter but 0, in order of appearance."""
    found: dict[int, Runs] = {}
    at = 0
    for adapter, count in items:
        start, at = at, at + count
        if adapter == 0:
            continue
        runs = found.setdefault(adapter, [])
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], at)
        else:
            runs.append((start, at))
    return found
