"""Requests whose first pages are the same: C kernels read these once for all of them, and each has the bits that it has alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.attention.torch_backend import CpuBackend
from engine.kernels.build import Kind
from engine.kernels.paged_attention import MAX_ROWS, MIN_SHARED, SharedPages, share_pages
from engine.kv.kv_pool import KVPool
from tests.attention.attention_cases import (
    Heads,
    Sequence,
    attend,
    fill,
    make_pool,
    make_sequences,
    make_step,
    run_step,
)
from tests.attention.test_cpu_kernels import kernel_of
from tests.kernels.test_linear import kinds

PAGE = 16
HEADS = Heads(q=16, kv=8, dim=32)


def grouped(
    pages: list[list[int]], lens: list[int], *, rows: list[int] | None = None, kv_heads: int = 8, threads: int = 1
) -> SharedPages:
    width = max(map(len, pages))
    table = torch.tensor([own + [-1] * (width - len(own)) for own in pages], dtype=torch.int32)
    return share_pages(table, lens, rows or [1] * len(lens), page_size=PAGE, kv_heads=kv_heads, threads=threads)


def pages_of(prefix: list[int], request: int, count: int) -> list[int]:
    return prefix + [1000 * (request + 1) + i for i in range(count - len(prefix))]


def parts(found: SharedPages) -> list[tuple[list[int], int]]:
    spans = pairwise(found.groups)
    return [(found.order[a:b], shared) for (a, b), shared in zip(spans, found.shared, strict=True)]


def test_requests_are_grouped_by_what_they_share() -> None:
    one, other = list(range(20)), [*range(15), *range(50, 70)]
    pages = [pages_of(one, 0, 30), pages_of(other, 1, 40), pages_of(one, 2, 22), pages_of([], 3, 40)]
    pages.append(pages_of(other, 4, 36))
    found = grouped(pages, [480, 640, 350, 640, 570])
    assert parts(found) == [([0, 2], 20 * PAGE), ([1, 4], 35 * PAGE), ([3], 0)]


def test_a_request_shares_no_more_than_it_has() -> None:
    pages = [list(range(20)), list(range(20))]
    assert parts(grouped(pages, [300, 320])) == [([0, 1], 300)]
    assert parts(grouped(pages, [MIN_SHARED - 1, 320])) == [([0], 0), ([1], 0)]  # what lies behind it is anything


def test_groups_are_no_larger_than_their_work_can_be_shared() -> None:
    pages = [list(range(20))] * 8
    assert [len(own) for own, _ in parts(grouped(pages, [320] * 8, threads=4))] == [4, 4]
    assert [len(own) for own, _ in parts(grouped(pages, [320] * 8, threads=16))] == [1] * 8
    rows = [MAX_ROWS - 1, 2, MAX_ROWS + 1, *[1] * 5]
    assert [own for own, _ in parts(grouped(pages, [320] * 8, rows=rows, kv_heads=32))] == [
        [0],
        [1],
        [2],
        [3, 4, 5, 6, 7],
    ]


def alike(lengths: list[int], shared: list[int], *, dtype: str) -> list[Sequence]:
    """Requests of which each has the first shared[i] tokens, and their pages, of the first one."""
    sequences = make_sequences(HEADS, lengths, page_size=PAGE, dtype=dtype)
    for s, tokens in zip(sequences[1:], shared[1:], strict=True):
        s.pages[: tokens // PAGE] = sequences[0].pages[: tokens // PAGE]
        for mine, first in ((s.k, sequences[0].k), (s.v, sequences[0].v)):
            mine[:tokens] = first[:tokens]
    return sequences


def pool_of(sequences: list[Sequence], starts: list[int], *, dtype: str, window: int = 0, fp8: bool = False) -> KVPool:
    pages = max(max(s.pages) for s in sequences)
    pool = make_pool(HEADS, num_pages=pages, page_size=PAGE, dtype=dtype, window=window, fp8=fp8)
    fill(pool, sequences, starts)
    return pool


def alone(s: Sequence) -> Sequence:
    return replace(s, pages=list(range(1, len(s.pages) + 1)))


@pytest.mark.parametrize(
    ("dtype", "window", "fp8"),
    [("float32", 0, False), ("bfloat16", 0, False), ("bfloat16", 300, False), ("bfloat16", 0, True)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_decode_step_has_the_bits_of_each_request_alone(dtype: str, window: int, fp8: bool, threads: int) -> None:
    lengths, shared = [500, 437, 600, 521, 490, 60], [500, 320, 384, 320, 272, 0]
    starts = [n - 1 for n in lengths]
    sequences = alike(lengths, shared, dtype=dtype)
    torch.set_num_threads(threads)
    try:
        pool = pool_of(sequences, starts, dtype=dtype, window=window, fp8=fp8)
        together = run_step(CpuBackend(pool), sequences, starts, lengths, page_size=PAGE, extend=False)
    finally:
        torch.set_num_threads(1)
    for s, length, out in zip(sequences, lengths, together, strict=True):
        pool = pool_of([alone(s)], [length - 1], dtype=dtype, window=window, fp8=fp8)
        expected = run_step(CpuBackend(pool), [alone(s)], [length - 1], [length], page_size=PAGE, extend=False)
        assert torch.equal(out, expected[0])


def test_drafted_rows_of_requests_that_share_pages_have_the_bits_of_plain_decoding() -> None:
    """Request 0 has two drafts: its last tokens stand in three rows."""
    lengths, shared = [500, 437, 600], [500, 320, 384]
    sequences = alike(lengths, shared, dtype="bfloat16")
    starts = [497, 436, 599]
    rows = [(0, 497), (0, 498), (0, 499), (1, 436), (2, 599)]
    step = make_step(
        [sequences[i] for i, _ in rows],
        [at for _, at in rows],
        [at + 1 for _, at in rows],
        page_size=PAGE,
        extend=False,
    )
    backend = CpuBackend(pool_of(sequences, starts, dtype="bfloat16"))
    backend.begin(replace(step, drafted=frozenset({1, 2})))
    q, k, v = (torch.stack([getattr(sequences[i], name)[at] for i, at in rows]) for name in "qkv")
    for (i, at), out in zip(rows, attend(backend, 1, q, k, v), strict=True):
        one = alone(sequences[i])
        pool = pool_of([one], [at], dtype="bfloat16")
        assert torch.equal(out, run_step(CpuBackend(pool), [one], [at], [at + 1], page_size=PAGE, extend=False)[0][0])


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
@pytest.mark.parametrize(("window", "fp8"), [(0, False), (300, False), (0, True)])
def test_prompts_behind_the_same_pages_have_the_bits_of_each_alone(kind: Kind, window: int, fp8: bool) -> None:
    """Of five, one has more queries than an item takes beside others, and one has nothing in common with the rest."""
    starts, ends, shared = [592, 530, 560, 528, 20], [600, 563, 1050, 570, 50], [592, 272, 544, 528, 0]
    sequences = alike(ends, shared, dtype="bfloat16")
    pool = pool_of(sequences, starts, dtype="bfloat16", window=window, fp8=fp8)
    together = run_step(kernel_of(kind, pool), sequences, starts, ends, page_size=PAGE)
    for s, start, end, out in zip(sequences, starts, ends, together, strict=True):
        pool = pool_of([alone(s)], [start], dtype="bfloat16", window=window, fp8=fp8)
        assert torch.equal(out, run_step(kernel_of(kind, pool), [alone(s)], [start], [end], page_size=PAGE)[0])
