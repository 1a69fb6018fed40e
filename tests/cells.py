"""Cells of a test's table: `make test` tries some, `make slow-tests` all the others."""

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def some(cells: Iterable[Any], *, tried: Collection[Any]) -> list[Any]:
    """Cells for `pytest.mark.parametrize`; those that are not in `tried` are slow. A tuple is a value for each parameter."""
    cells = list(cells)
    assert all(cell in cells for cell in tried), "a cell that is tried is not in the table"
    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=() if cell in tried else pytest.mark.slow)
        for cell in cells
    ]


def in_turn(*values: Sequence[Any]) -> list[Any]:
    """Cells of all combinations, of which those are tried in which the values come up in turn, each at least once."""
    turns = range(max(map(len, values)))
    return some(product(*values), tried={tuple(of[turn % len(of)] for of in values) for turn in turns})
