"""Rows of one request in a step: a run. Those behind its first read drafts, each a token further."""

from collections.abc import Sequence

from engine.core.plan import PlanItem


def runs_of(items: Sequence[PlanItem]) -> list[list[int]]:
    """The items of each request, those with drafts behind the known one."""
    runs: list[list[int]] = []
    for i, item in enumerate(items):
        if item.draft:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
