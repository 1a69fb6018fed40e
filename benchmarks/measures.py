"""A measure is a function that gives tables of figures (measures.toml). This takes ways in turns, and writes the tables."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import psutil

from deploy.bench.stats import table

Cell = str | float | int | None
Row = dict[str, Cell]
Tables = dict[str, list[Row]]


def in_turns(
    ways: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int, *, warm_up: int = 0
) -> dict[str, dict[str, float]]:
    """Return for each way the medians of its figures; each round takes all ways, every second one in reverse order.

    What drifts on the machine (heat, neighbours) then falls on all ways alike. The first `warm_up` rounds do not count.
    """
    samples: dict[str, list[Mapping[str, float]]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name in list(ways) if number % 2 == 0 else reversed(list(ways)):
            found = ways[name]()
            if number >= warm_up:
                samples[name].append(found)
                tell(name, number=number, **found)
    return {name: medians(rows) for name, rows in samples.items()}


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: median(row[key] for row in rows) for key in rows[0]}


def tell(name: str, **figures: Any) -> None:
    """Print a line of progress to stderr."""
    shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    print(f"{name}: {json.dumps(shown)}", file=sys.stderr, flush=True)


def used_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds, user and system, that these processes have used so far."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def rendered(tables: Tables) -> str:
    """Write tables as Markdown, each below its sentence."""
    parts = []
    for above, rows in tables.items():
        parts += [above] if above else []
        if rows:
            heads = list(dict.fromkeys(head for row in rows for head in row))
            parts.append(table(heads, [[shown(row.get(head)) for head in heads] for row in rows]))
    return "\n\n".join(parts)


def shown(value: Cell) -> str:
    """Write a figure with about three digits; None: an empty cell."""
    if not isinstance(value, float):
        return "" if value is None else f"{value:,}" if isinstance(value, int) else value
    if value == 0.0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
