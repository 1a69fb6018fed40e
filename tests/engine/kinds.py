"""One family for each kind of layer: with these every way to compute is tried in `make test`, with the others the usual ones.

The others' cells are for `make slow-tests`. What they share with these is the kind of their layers and of their cache; what is their own,
weights, norms and RoPE, the usual ways show, and all families in all of tests/e2e/models/zoo.py.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

# Plain attention; with sinks and windows; latents; recurrent states.
OF_EACH_KIND = {"qwen3", "gpt_oss", "deepseek_v3", "qwen3_next"}
F = TypeVar("F", bound=Callable[..., Any])


def usual(*cells: dict[str, object]) -> Callable[[F], F]:
    """Name the cells of a test, by values of its parameters, that are tried with every family (fixture `checkpoint`)."""

    def note(test: F) -> F:
        test.usual_cells = cells  # type: ignore[attr-defined]
        return test

    return note


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all cells that are neither usual nor of a family that stands for a kind."""
    for item in items:
        cells = getattr(getattr(item, "function", None), "usual_cells", None)
        if cells is None:
            continue
        asked = item.callspec.params  # type: ignore[attr-defined]
        is_usual = any(cell.items() <= asked.items() for cell in cells)
        if asked["checkpoint"] not in OF_EACH_KIND and not is_usual:
            item.add_marker(pytest.mark.slow)
