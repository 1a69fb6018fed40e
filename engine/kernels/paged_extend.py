"""Prompt attention on CPU (paged_extend.c)."""

import ctypes
from pathlib import Path

import torch

from engine.kernels import tape
from engine.kernels.build import fields, load_library
from engine.kernels.layer_call import HEADS, POINTERS, SCORES, STRIDES, LayerCall, check_pages, layout_of
from engine.kernels.shared_pages import share_pages
from engine.kernels.softmax import Softmax
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch

SOURCE = Path(__file__).with_suffix(".c")
ABI_VERSION = 7
LANES = 16
DTYPE = "bfloat16"

_TABLES = ("page_table", "first_rows", "q_lens", "kv_lens", "groups", "shared", "token_pages", "token_offsets")
_NUMBERS = ("tokens", "requests", "num_groups", *HEADS, "is_fp8", "kind")


class _Args(ctypes.Structure):
    _fields_ = fields((*POINTERS, *_TABLES), (*STRIDES, "table_width", *_NUMBERS), SCORES)


class PagedExtend:
    """One pool's prompt attention; drops the GIL. Results depend only on position and KV."""

    def __init__(self, library: ctypes.CDLL, pool: KVPool) -> None:
        self._call = library.tandem_paged_extend
        self._call.argtypes = [ctypes.POINTER(_Args)]
        self._pool = pool
        self._layer = LayerCall(pool)
        self._args = _Args(kind=library.tandem_paged_extend_kind(), **layout_of(pool))
        self._kept: tuple[torch.Tensor, ...] = ()  # keeps alive memory that _args points to

    def begin(self, step: StepBatch, *, skip: frozenset[int] = frozenset()) -> None:
        """`skip`: requests with written KV and undefined output rows."""
        table = step.page_rows(self._pool.page_size)
        self._check(step, table)
        chosen = [i for i in range(len(step.q_lens)) if i not in skip]
        found = share_pages(
            table[chosen] if skip else table,
            [step.kv_lens[i] - step.q_lens[i] for i in chosen],
            [1] * len(chosen),
            page_size=self._pool.page_size,
            kv_heads=min(spec.num_kv_heads for spec in self._pool.specs),
            threads=torch.get_num_threads(),
        )
        chosen = [chosen[i] for i in found.order]
        spans = step.spans()
        rows = [(spans[i][0], step.q_lens[i], step.kv_lens[i]) for i in chosen]
        runs = torch.tensor(rows).T.contiguous()
        groups, shared = torch.tensor(found.groups), torch.tensor(found.shared)
        table = table[torch.tensor(chosen)]
        self._kept = (
            table,
            *runs,
            groups,
            shared,
            step.token_pages.contiguous(),
            step.token_offsets.contiguous(),
            runs,
        )
        args = self._args
        for name, tensor in zip(_TABLES, self._kept, strict=False):
            setattr(args, name, tensor.data_ptr())
        args.table_width, args.num_groups = table.shape[1], len(shared)
        args.tokens, args.requests = len(step.token_pages), len(chosen)

    def attend_turned(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
    ) -> torch.Tensor:
        """Write k and v, return [T, heads * head_dim]."""
        args = self._args
        rows = self._layer.fill(args, layer, q, k, v, softmax)
        assert len(rows.q) == args.tokens, (q.shape, args.tokens)
        if tape.call_once(self._call, args):
            raise MemoryError("paged extend: no memory for one block of queries")
        return rows.out.flatten(1).to(q.dtype)

    def _check(self, step: StepBatch, table: torch.Tensor) -> None:
        check_pages(self._pool, table, step.token_pages)
        low, high = step.token_offsets.aminmax()
        assert int(low) >= 0 and int(high) < self._pool.page_size, (int(low), int(high))
        assert all(0 < q <= kv for q, kv in zip(step.q_lens, step.kv_lens, strict=True)), (step.q_lens, step.kv_lens)
        assert max(step.kv_lens) <= table.shape[1] * self._pool.page_size, step.kv_lens
        assert sum(step.q_lens) == len(step.token_pages) == len(step.token_offsets), step.q_lens
        assert len(step.q_lens) == len(table), step.q_lens


def make_paged_extend(pool: KVPool) -> PagedExtend | None:
    """Return None if a layer does not fit, or if not buildable (logged)."""
    if not all(spec.head_dim % LANES == 0 and spec.dtype == DTYPE for spec in pool.specs):
        return None
    library = load_library(SOURCE)
    if library is None:
        return None
    assert library.tandem_paged_extend_abi() == ABI_VERSION
    return PagedExtend(library, pool)
