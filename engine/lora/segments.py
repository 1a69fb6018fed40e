"""Which tokens of a step belong to which adapter. Pure."""

from collections.abc import Iterable
from typing import NamedTuple


class Run(NamedTuple):
    """Tokens `rows` of the step, one beside the other, are those of `adapter`."""

    adapter: int
    rows: slice


def adapter_runs(items: Iterable[tuple[int, int]]) -> list[Run]:
    """`items`: (adapter, tokens), one after another. Neighbours of one adapter are one run; 0 has none."""
    runs: list[Run] = []
    at = 0
    for adapter, count in items:
        start, at = at, at + count
        if adapter and runs and runs[-1].adapter == adapter and runs[-1].rows.stop == start:
            runs[-1] = Run(adapter, slice(runs[-1].rows.start, at))
        elif adapter:
            runs.append(Run(adapter, slice(start, at)))
    return runs
