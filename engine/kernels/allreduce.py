"""Sums and gathers of the ranks of one machine over shared memory: allreduce.c.

C trusts its arguments: shapes and types are asserted before each call, which drops the GIL. A tape records sums and gathers.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from engine.kernels import tape
from engine.kernels.build import fields, load_library
from engine.kernels.failures import failure

SOURCE = Path(__file__).with_suffix(".c")
ABI_VERSION = 4


class _Wait(ctypes.Structure):
    """Mirror of `struct wait` in allreduce.c."""

    _fields_ = fields(("word", "abort"), ("value",))


class _Sum(ctypes.Structure):
    """Mirror of `struct sum`."""

    _fields_ = fields(
        ("partial", "out", "lines", "windows", "abort"),
        ("elements", "begin", "end", "rank", "ranks", "window", "out_is_f32"),
    )


class _Rows(ctypes.Structure):
    """Mirror of `struct rows`."""

    _fields_ = fields(
        ("part", "out", "lines", "windows", "abort"), ("bytes", "begin", "size", "rank", "ranks", "window")
    )


class _Take(ctypes.Structure):
    """Mirror of `struct take`."""

    _fields_ = fields(
        ("part", "out", "wanted", "lines", "windows", "abort"),
        ("row_bytes", "total", "first", "count", "wants", "rank", "ranks", "window"),
    )


class _Gather(ctypes.Structure):
    """Mirror of `struct gather`."""

    _fields_ = fields(("part", "all", "lines", "abort"), ("rows", "columns", "first", "total", "rank", "ranks"))


class SharedLines(NamedTuple):
    """Addresses in shared memory: a line per rank, and the abort word."""

    lines: int
    abort: int
    rank: int
    ranks: int


class Allreduce:
    """The kernels of allreduce.c. Each raises RanksEnded once the abort word is not 0."""

    def __init__(self, library: ctypes.CDLL) -> None:
        assert library.tandem_allreduce_abi() == ABI_VERSION
        self._wait = library.tandem_wait
        self._sum = library.tandem_sum
        self._rows = library.tandem_rows
        self._take = library.tandem_take
        self._gather = library.tandem_gather
        for function, args in (
            (self._wait, _Wait),
            (self._sum, _Sum),
            (self._rows, _Rows),
            (self._take, _Take),
            (self._gather, _Gather),
        ):
            function.argtypes = [ctypes.POINTER(args)]

    def wait(self, word: int, value: int, *, abort: int) -> None:
        """Return when the int64 at address `word` is `value` or more."""
        if failed := self._wait(_Wait(word=word, abort=abort, value=value)):
            raise failure(failed)

    def sum(
        self, at: SharedLines, partial: torch.Tensor, *, rows: range, windows: int, window: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[len(rows), n] of `dtype`, float32 or bfloat16, for `partial` [T, n] float32, whose `rows` are wanted here.

        `windows`: address of [2, ranks, window].
        """
        assert dtype in (torch.float32, torch.bfloat16), dtype
        total, width = partial.shape
        assert 0 <= rows.start <= rows.stop <= total and rows.step == 1, (rows, partial.shape)
        out = tape.empty((len(rows), width), dtype)
        args = _Sum(
            partial=_address(partial),
            out=out.data_ptr(),
            lines=at.lines,
            windows=windows,
            abort=at.abort,
            elements=partial.numel(),
            begin=rows.start * width,
            end=rows.stop * width,
            rank=at.rank,
            ranks=at.ranks,
            window=window,
            out_is_f32=dtype == torch.float32,
        )
        if failed := tape.call(self._sum, args):
            raise failure(failed)
        return out

    def rows(
        self, at: SharedLines, part: torch.Tensor, *, first: int, total: int, windows: int, window: int
    ) -> torch.Tensor:
        """[total, n] of all ranks' `part` [T, n], dense; this one's rows begin at `first`.

        `windows`: address of 2 x `window` bytes. Rows that no rank brings are of any content.
        """
        count, width = part.shape
        assert part.is_contiguous() and 0 <= first <= first + count <= total, (part.shape, part.stride(), first, total)
        out = tape.empty((total, width), part.dtype)
        row_bytes = width * part.element_size()
        args = _Rows(
            part=part.data_ptr(),
            out=out.data_ptr(),
            lines=at.lines,
            windows=windows,
            abort=at.abort,
            bytes=total * row_bytes,
            begin=first * row_bytes,
            size=count * row_bytes,
            rank=at.rank,
            ranks=at.ranks,
            window=window,
        )
        if failed := tape.call(self._rows, args):
            raise failure(failed)
        return out

    def take(
        self,
        at: SharedLines,
        part: torch.Tensor,
        *,
        first: int,
        total: int,
        wanted: torch.Tensor,
        windows: int,
        window: int,
    ) -> torch.Tensor:
        """[len(wanted), n]: rows `wanted` [N] i64 of the [total, n] that all ranks' `part` [T, n], dense, are together.

        This one's rows begin at `first`. `windows`: as of `rows`; what is wanted follows from the step, so no tape records it.
        """
        count, width = part.shape
        row_bytes = width * part.element_size()
        assert part.is_contiguous() and 0 <= first <= first + count <= total, (part.shape, part.stride(), first, total)
        assert wanted.dtype == torch.int64 and len(wanted.shape) == 1 and wanted.is_contiguous(), (
            wanted.dtype,
            wanted.shape,
        )
        assert 0 < row_bytes <= window, (row_bytes, window)
        out = part.new_empty((len(wanted), width))
        args = _Take(
            part=part.data_ptr(),
            out=out.data_ptr(),
            wanted=wanted.data_ptr(),
            lines=at.lines,
            windows=windows,
            abort=at.abort,
            row_bytes=row_bytes,
            total=total,
            first=first,
            count=count,
            wants=len(wanted),
            rank=at.rank,
            ranks=at.ranks,
            window=window,
        )
        if failed := tape.call_once(self._take, args):
            raise failure(failed)
        return out

    def gather(self, at: SharedLines, part: torch.Tensor, *, whole: torch.Tensor, first: int) -> None:
        """Write `part` [T, columns] float32 into the columns from `first` of `whole` [T, total]; rank 0 waits for all."""
        rows, columns = part.shape
        assert len(whole) == rows and first + columns <= whole.shape[1], (part.shape, whole.shape, first)
        args = _Gather(
            part=_address(part),
            all=_address(whole),
            lines=at.lines,
            abort=at.abort,
            rows=rows,
            columns=columns,
            first=first,
            total=whole.shape[1],
            rank=at.rank,
            ranks=at.ranks,
        )
        if failed := tape.call(self._gather, args):
            raise failure(failed)


@cache
def allreduce() -> Allreduce | None:
    """This process's kernels, or None where there is no compiler (logged)."""
    library = load_library(SOURCE)
    return None if library is None else Allreduce(library)


def _address(x: torch.Tensor) -> int:
    assert x.dtype == torch.float32 and x.is_contiguous(), (x.dtype, x.shape, x.stride())
    return x.data_ptr()
