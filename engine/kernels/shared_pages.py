"""Requests of a step that have the same pages in front, as those behind one system prompt: attention reads these once for all of them.

Sources of the idea: Juravsky et al. 2024 (Hydragen), Ye et al. 2024 (cascade inference in FlashInfer). Here no sum is cut in two: each
request passes over the same blocks in the same order as alone, so its bits are those that it has alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LEAST_SHARED = 256  # tokens: fewer hardly save a read
MOST_ROWS = 32  # of a group: what it sums stays in the L2 cache beside the tokens that it reads
ITEMS_A_THREAD = 4  # groups times KV heads, at least, so that no thread ends up without work


@dataclass(frozen=True, slots=True)
class SharedPages:
    """order:  requests, those of a group beside one another
    groups: first entry of `order` of each group, and the end
    shared: tokens of each group that lie in the same pages for all of it; 0: of a request by itself
    """

    order: list[int]
    groups: list[int]
    shared: list[int]


def share_pages(
    pages: torch.Tensor, lens: Sequence[int], rows: Sequence[int], *, page_size: int, kv_heads: int, threads: int
) -> SharedPages:
    """Group requests by their first pages.

    pages [requests, P] int32: page ids, of any value behind a request's tokens; `lens`: tokens that lie there for all of its rows;
    `rows`: how many it has in this step; `kv_heads`, `threads`: what a group's work is shared by.
    """
    count, column = len(lens), -(-LEAST_SHARED // page_size) - 1
    most = min(MOST_ROWS, count * kv_heads // (ITEMS_A_THREAD * threads))
    if most < 2 or pages.shape[1] <= column:
        return _apart(count)
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for request, (page, tokens) in enumerate(zip(pages[:, column].tolist(), lens, strict=True)):
        alike[page if tokens >= (column + 1) * page_size else f"request {request}"].append(request)
    if len(alike) == count:
        return _apart(count)
    order: list[int] = []
    groups, shared = [0], []
    for requests in alike.values():
        for group in _parts(requests, rows, most):
            order += group
            groups.append(len(order))
            shared.append(_shared(pages, lens, group, page_size))
    return SharedPages(order, groups, shared)


def _apart(count: int) -> SharedPages:
    return SharedPages(list(range(count)), list(range(count + 1)), [0] * count)


def _parts(requests: list[int], rows: Sequence[int], most: int) -> list[list[int]]:
    """Cut `requests` into groups of at most `most` rows, or of one request."""
    parts: list[list[int]] = []
    left = 0
    for request in requests:
        if rows[request] > left:
            parts.append([])
            left = most
        parts[-1].append(request)
        left -= rows[request]
    return parts


def _shared(pages: torch.Tensor, lens: Sequence[int], group: list[int], page_size: int) -> int:
    """Count the tokens in the first pages of `group` that are the same."""
    if len(group) == 1:
        return 0
    own = pages[group]
    same = int((own == own[0]).all(0).long().cumprod(0).sum()) * page_size
    return min(same, *(lens[request] for request in group))
