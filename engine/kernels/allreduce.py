"""Sums and gathers over a machine's ranks through shared memory (allreduce.c).

C trusts its arguments: shapes and types are asserted before each call. Calls drop the GIL; tapes
record sums and gathers.
"""

import ctypes
from typing import NamedTuple

import torch

from engine.kernels import tape
from engine.kernels.build import CSource, failure, fields


class _Wait(ctypes.Structure):
    _fields_ = fields(("word", "abort"), ("value",))


class _Sum(ctypes.Structure):
    _fields_ = fields(
        ("partial", "out", "lines", "windows", "abort"),
        ("elements", "begin", "end", "rank", "ranks", "window", "out_is_f32"),
    )


class _Rows(ctypes.Structure):
    _fields_ = fields(
        ("part", "out", "lines", "windows", "abort"), ("bytes", "begin", "size", "rank", "ranks", "window")
    )


class _Take(ctypes.Structure):
    _fields_ = fields(
        ("part", "out", "wanted", "lines", "windows", "abort"),
        ("row_bytes", "total", "first", "count", "wants", "rank", "ranks", "window"),
    )


class _Gather(ctypes.Structure):
    _fields_ = fields(("part", "all", "lines", "abort"), ("rows", "columns", "first", "total", "rank", "ranks"))


SOURCE = CSource("allreduce", {"wait": _Wait, "sum": _Sum, "rows": _Rows, "take": _Take, "gather": _Gather})


class SharedLines(NamedTuple):
    """Shared memory addresses: one line per rank, and the abort word."""

    lines: int
    abort: int
    rank: int
    ranks: int


class Allreduce:
    """Kernels; each raises RanksEnded once the abort word is set."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernels = library

    def wait(self, word: int, value: int, *, abort: int) -> None:
        """Wait until the int64 at `word` is at least `value`."""
        if failed := self._kernels.tandem_wait(_Wait(word=word, abort=abort, value=value)):
            raise failure(failed)

    def sum(
        self, at: SharedLines, partial: torch.Tensor, *, rows: range, windows: int, window: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows `rows` of the sum over ranks of `partial` float32[T, n], as `dtype`.

        `windows`: address of [2, ranks, window].
        """
        assert dtype in (torch.float32, torch.bfloat16), dtype
        total, width = partial.shape
        assert 0 <= rows.start <= rows.stop <= total and rows.step == 1, (rows, partial.shape)
        out = tape.empty((len(rows), width), dtype)
        args = _Sum(
            partial=_address(partial),
            out=out.data_ptr(),
            windows=windows,
            elements=partial.numel(),
            begin=rows.start * width,
            end=rows.stop * width,
            window=window,
            out_is_f32=dtype == torch.float32,
            **at._asdict(),
        )
        if failed := tape.call(self._kernels.tandem_sum, args):
            raise failure(failed)
        return out

    def rows(
        self, at: SharedLines, part: torch.Tensor, *, first: int, total: int, windows: int, window: int
    ) -> torch.Tensor:
        """Gather rows (collectives.py). `windows`: address of 2 x `window` bytes."""
        count, width = part.shape
        assert part.is_contiguous() and 0 <= first <= first + count <= total, (part.shape, part.stride(), first, total)
        out = tape.empty((total, width), part.dtype)
        row_bytes = width * part.element_size()
        args = _Rows(
            part=part.data_ptr(),
            out=out.data_ptr(),
            windows=windows,
            bytes=total * row_bytes,
            begin=first * row_bytes,
            size=count * row_bytes,
            window=window,
            **at._asdict(),
        )
        if failed := tape.call(self._kernels.tandem_rows, args):
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
        """Return rows `wanted` i64[N] of `rows`. Not recorded: `wanted` varies."""
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
            windows=windows,
            row_bytes=row_bytes,
            total=total,
            first=first,
            count=count,
            wants=len(wanted),
            window=window,
            **at._asdict(),
        )
        if failed := tape.call_once(self._kernels.tandem_take, args):
            raise failure(failed)
        return out

    def gather(self, at: SharedLines, part: torch.Tensor, *, whole: torch.Tensor, first: int) -> None:
        """Write `part` float32[T, columns] into `whole` from column `first`; rank 0 waits."""
        rows, columns = part.shape
        assert len(whole) == rows and first + columns <= whole.shape[1], (part.shape, whole.shape, first)
        args = _Gather(
            part=_address(part),
            all=_address(whole),
            rows=rows,
            columns=columns,
            first=first,
            total=whole.shape[1],
            **at._asdict(),
        )
        if failed := tape.call(self._kernels.tandem_gather, args):
            raise failure(failed)


allreduce = SOURCE.once(Allreduce)


def _address(x: torch.Tensor) -> int:
    assert x.dtype == torch.float32 and x.is_contiguous(), (x.dtype, x.shape, x.stride())
    return x.data_ptr()
