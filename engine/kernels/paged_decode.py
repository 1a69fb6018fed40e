"""Decode attention on CPU (paged_decode.c)."""

import ctypes
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from engine.kernels import tape
from engine.kernels.build import fields, load_library
from engine.kernels.layer_call import HEADS, POINTERS, SCORES, STRIDES, LayerCall, check_pages, layout_of
from engine.kernels.path_rows import PATHS, fill_paths
from engine.kernels.shared_pages import share_pages
from engine.kernels.softmax import Softmax
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch

SOURCE = Path(__file__).with_suffix(".c")
ABI_VERSION = 10
LANES = 16
DTYPES = ("bfloat16", "float32")
QUERIES_OF_FP8 = "bfloat16"
_TABLES = ("page_table", "kv_lens", "token_pages", "token_offsets", "rows", "requests", "groups", "shared")


class _Order(NamedTuple):
    rows: torch.Tensor
    requests: torch.Tensor
    groups: torch.Tensor
    shared: torch.Tensor


class _Step(ctypes.Structure):
    _fields_ = fields(
        (*_TABLES, *PATHS),
        ("batch", "num_groups", "table_width", "path_width"),
    )


class _Args(ctypes.Structure):
    _fields_ = fields((*POINTERS, "step"), (*STRIDES, *HEADS, "is_bf16", "is_fp8"), SCORES)


class PagedDecode:
    """One pool's decode attention, one row per token; drops the GIL."""

    def __init__(self, library: ctypes.CDLL, pool: KVPool) -> None:
        self._call = library.tandem_paged_decode
        self._call.argtypes = [ctypes.POINTER(_Args)]
        self._pool = pool
        self._layer = LayerCall(pool)
        self._step = _Step()  # recorded calls point here, too, and so read a new step
        self._args = _Args(step=ctypes.addressof(self._step), **layout_of(pool))
        self._kept: tuple[torch.Tensor, ...] = ()  # keeps alive memory that _step points to
        self._paths: tuple[torch.Tensor, ...] = ()  # likewise

    def begin(self, step: StepBatch) -> None:
        table = step.page_rows(self._pool.page_size)
        kv_lens = torch.tensor(step.kv_lens, dtype=torch.int32)
        self._check(step, table)
        order = self._order(step, table)
        self._kept = (table, kv_lens, step.token_pages.contiguous(), step.token_offsets.contiguous(), *order)
        now = self._step
        for name, tensor in zip(_TABLES, self._kept, strict=True):
            setattr(now, name, tensor.data_ptr())
        now.batch, now.num_groups, now.table_width = len(kv_lens), len(order.shared), table.stride(0)
        self._paths = fill_paths(now, step, positions=table.shape[1] * self._pool.page_size)

    def attend_turned(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
    ) -> torch.Tensor:
        """Write k and v, return [B, heads * head_dim]."""
        args = self._args
        rows = self._layer.fill(args, layer, q, k, v, softmax)
        assert len(rows.q) == self._step.batch, (q.shape, self._step.batch)
        args.is_bf16 = rows.q.dtype == torch.bfloat16
        if tape.call(self._call, args):
            raise MemoryError("paged decode: no memory for one request's accumulators")
        return rows.out.flatten(1).to(q.dtype)

    def _order(self, step: StepBatch, table: torch.Tensor) -> _Order:
        first = step.first_rows()
        counts = [end - begin for begin, end in pairwise(first)]
        found = share_pages(
            table[first[:-1]] if step.drafted else table,
            [step.kv_lens[row] for row in first[:-1]],
            counts,
            page_size=self._pool.page_size,
            kv_heads=min(spec.num_kv_heads for spec in self._pool.specs),
            threads=torch.get_num_threads(),
        )
        rows = [row for request in found.order for row in range(first[request], first[request + 1])]
        requests = [0, *accumulate(counts[request] for request in found.order)]
        return _Order(*(torch.tensor(x) for x in (rows, requests, found.groups, found.shared)))

    def _check(self, step: StepBatch, table: torch.Tensor) -> None:
        check_pages(self._pool, table, step.token_pages)
        assert min(step.kv_lens) > 0 and max(step.kv_lens) <= table.shape[1] * self._pool.page_size, step.kv_lens
        assert len(step.kv_lens) == len(table) == len(step.token_pages) == len(step.token_offsets)


def make_paged_decode(pool: KVPool) -> PagedDecode | None:
    """Return None if a layer does not fit, or without a compiler (logged)."""
    if not all(spec.head_dim % LANES == 0 and spec.dtype in DTYPES for spec in pool.specs):
        return None
    if any(spec.fp8 and spec.dtype != QUERIES_OF_FP8 for spec in pool.specs):
        return None
    library = load_library(SOURCE)
    if library is None:
        return None
    assert library.tandem_paged_decode_abi() == ABI_VERSION
    return PagedDecode(library, pool)
