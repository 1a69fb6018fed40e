"""Groups of requests with common first pages (a system prompt), which attention reads once.

Ideas: Juravsky et al. 2024 (Hydragen), Ye et al. 2024 (cascade inference in FlashInfer). Each
request keeps its own order of blocks, so its bits are the same in any batch.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LEAST_SHARED = 256  # tokens: fewer hardly save a read
MOST_ROWS = 32  # per group: its sums and the tokens it reads stay in the L2 cache
ITEMS_A_THREAD = 4  # minimum of groups times KV heads per thread, to keep all busy


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Groups in `order` of requests, with their first entries and common tokens."""

    order: list[int]
    groups: list[int]
    shared: list[int]


def share_pages(
    pages: torch.Tensor, lens: Sequence[int], rows: Sequence[int], *, page_size: int, kv_heads: int, threads: int
) -> SharedPages:
    """Group requests by first pages, int32 page ids [requests, P], valid up to `lens` tokens.

    `rows`: each request's rows in this step.
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
    if len(group) == 1:
        return 0
    own = pages[group]
    same = int((own == own[0]).all(0).long().cumprod(0).sum()) * page_size
    return min(same, *(lens[request] for request in group))
