"""Rows of a step that verifies a draft tree: order and KV places.

Rows are by depth, so lengths do not decrease. The first-candidate path has its own places; others
follow, and move if accepted (engine/executor/draft_pass.py).

    known  + a + d            rows     known  a  b  d  e  c
           |   + e            depth      0    1  1  2  2  2
           + b + c            place      0    1  3  2  4  5        behind the known tokens
"""

from typing import NamedTuple

from engine.core.drafts import Draft


class DraftRow(NamedTuple):
    """`depth` after the known token; `behind`: distance to the row that samples it; KV `place`."""

    token: int
    depth: int
    behind: int
    place: int


def rows_of(draft: Draft) -> list[DraftRow]:
    if not draft.parents:
        return [DraftRow(token, depth, 1, depth) for depth, token in enumerate(draft.tokens, 1)]
    depths = _depths(draft)
    order = sorted(range(len(draft)), key=depths.__getitem__)
    row_of = {-1: -1} | {token: row for row, token in enumerate(order)}
    places = _places(draft, depths)
    return [
        DraftRow(draft.tokens[i], depths[i], row - row_of[draft.parents[i]], places[i]) for row, i in enumerate(order)
    ]


def _depths(draft: Draft) -> list[int]:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _places(draft: Draft, depths: list[int]) -> list[int]:
    places = {i: depths[i] for i in draft.first_path()}
    behind = iter(range(len(places) + 1, len(draft) + 1))
    return [places[i] if i in places else next(behind) for i in range(len(draft))]
