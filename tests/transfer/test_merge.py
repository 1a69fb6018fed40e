"""Run merging and splitting against the plain definition: copying the pieces equals copying item by item."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transfer_backends.contract import Region
from transfer_backends.shards import batches, merge_runs, plan_pieces

ITEM = 8
runs = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 12)), max_size=12)


def ids(drawn: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    src = [s + i for s, _, n in drawn for i in range(n)]
    dst = [d + i for _, d, n in drawn for i in range(n)]
    return np.array(src, np.int64), np.array(dst, np.int64)


@given(runs, st.integers(1, 100), st.integers(1, 5), st.integers(1, 300))
def test_pieces_copy_the_same_bytes(drawn: list, max_piece: int, max_pieces: int, max_bytes: int) -> None:
    src, dst = ids(drawn)
    pieces = plan_pieces(
        src, dst, src=Region(1000, 400, ITEM, None), dst=Region(50000, 400, ITEM, None), max_piece_bytes=max_piece
    )
    wanted = [
        (1000 + int(s) * ITEM + b, 50000 + int(d) * ITEM + b)
        for s, d in zip(src, dst, strict=True)
        for b in range(ITEM)
    ]
    copied = []
    for part in batches(pieces, max_pieces=max_pieces, max_bytes=max_bytes):
        assert 1 <= len(part) <= max_pieces
        assert len(part) == 1 or part.size_bytes <= max_bytes
        for s, d, n in zip(part.src.tolist(), part.dst.tolist(), part.lengths.tolist(), strict=True):
            assert n <= max(max_piece, ITEM) and n % ITEM == 0
            copied.extend((s + b, d + b) for b in range(n))
    assert copied == wanted


@given(runs)
def test_runs_are_longest(drawn: list) -> None:
    src, dst = ids(drawn)
    s, d, n = merge_runs(src, dst)
    assert int(n.sum()) == len(src)
    ends = list(zip((s + n).tolist(), (d + n).tolist(), strict=True))
    starts = list(zip(s.tolist(), d.tolist(), strict=True))
    assert not any(end == start for end, start in zip(ends, starts[1:], strict=False))


def test_adjacent_pages_are_one_piece() -> None:
    pieces = plan_pieces(
        np.arange(5, 105),
        np.arange(200, 300),
        src=Region(0, 400, 64, None),
        dst=Region(0, 400, 64, None),
        max_piece_bytes=1 << 20,
    )
    assert len(pieces) == 1 and pieces.lengths.tolist() == [6400]
