"""Attention on a CPU over paged KV: prompts by paged_extend.c, single tokens by paged_decode.c."""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from engine.kernels import tape
from engine.kernels.build import CSource, fields
from engine.kv.kv_pool import DTYPES, KVPool
from engine.kv.step_batch import StepBatch

# ---- Attention softmax options of a layer, for all backends.


@dataclass(frozen=True, slots=True)
class Softmax:
    """softmax(s), s = scale * q.k, or cap * tanh(scale * q.k / cap) with a `cap` (Gemma 2).

    `sinks` float32[query heads]: a score per head without a value (arXiv:2309.17453, gpt-oss).
    """

    scale: float
    cap: float = 0.0
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        sinks = self.sinks
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), sinks

    @property
    def is_plain(self) -> bool:
        return not self.cap and self.sinks is None


MIN_SHARED = 256  # tokens: fewer hardly save a read
MAX_ROWS = 32  # per group: its sums and the tokens it reads stay in the L2 cache
ITEMS_A_THREAD = 4  # minimum of groups times KV heads per thread, to keep all busy


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Groups in `order` of requests, with their first entries and common tokens.

    Ideas: Juravsky et al. 2024 (Hydragen), Ye et al. 2024 (cascade inference in FlashInfer). Each
    request keeps its own order of blocks, so its bits are the same in any batch.
    """

    order: list[int]
    groups: list[int]
    shared: list[int]


def share_pages(
    pages: torch.Tensor, lens: Sequence[int], rows: Sequence[int], *, page_size: int, kv_heads: int, threads: int
) -> SharedPages:
    """Group requests by first pages, int32 page ids [requests, P], valid up to `lens` tokens.

    `rows`: each request's rows in this step.
    """
    count, column = len(lens), -(-MIN_SHARED // page_size) - 1
    most = min(MAX_ROWS, count * kv_heads // (ITEMS_A_THREAD * threads))
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


# ---- Draft trees in C structures: locations of each row's newest tokens.

PATHS = ("path_starts", "path_places")


def fill_paths(to: ctypes.Structure, step: StepBatch, *, positions: int) -> tuple[torch.Tensor, ...]:
    """Set the step's paths; return tensors to keep alive."""
    if step.paths is None:
        to.path_starts = to.path_places = None
        return ()
    kept = step.paths.starts.contiguous(), step.paths.places.contiguous()
    _check_paths(step, *kept, positions=positions)
    to.path_starts, to.path_places = (x.data_ptr() for x in kept)
    to.path_width = kept[1].shape[1]
    return kept


def _check_paths(step: StepBatch, starts: torch.Tensor, places: torch.Tensor, *, positions: int) -> None:
    kv_lens = torch.tensor(step.kv_lens)
    assert starts.dtype == places.dtype == torch.int32, (starts.dtype, places.dtype)
    assert len(starts) == len(places) == len(kv_lens), (starts.shape, places.shape, len(kv_lens))
    first, longest = starts.amin(), (kv_lens - starts).amax()
    assert int(first) >= 0 and int(longest) <= places.shape[1], (starts, step.kv_lens)
    low, high = places.aminmax()
    assert int(low) >= 0 and int(high) < positions, (int(low), int(high), positions)
    assert all(step.kv_lens[i - 1] <= step.kv_lens[i] for i in step.drafted), "rows of a tree come by depth"


# ---- Common arguments of both paged attention kernels.

POINTERS = ("q", "k_new", "v_new", "out", "k_cache", "v_cache", "sinks")
STRIDES = ("q_stride", "k_stride", "v_stride", "page_stride_bytes", "unit_stride_bytes")
HEADS = ("heads", "kv_heads", "units", "dim", "page_size", "window")
SCORES = ("scale", "cap")


class Rows(NamedTuple):
    """New tokens in the cache's dtype, and their output, alive during the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


class LayerCall:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._caches = [(pool.k(i).data_ptr(), pool.v(i).data_ptr()) for i in range(pool.num_layers)]

    def fill(
        self, args: ctypes.Structure, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
    ) -> Rows:
        """Fill in addresses and layout; q [T, heads, head_dim], k, v [T, kv_heads, head_dim]."""
        spec = self._pool.specs[layer]
        dtype = DTYPES[spec.dtype]
        q, k, v = (_dense_heads(x.to(dtype)) for x in (q, k, v))
        assert k.shape == v.shape == (len(q), spec.num_kv_heads, spec.head_dim), (q.shape, k.shape, v.shape)
        assert q.shape[2] == spec.head_dim, q.shape
        rows = Rows(q, k, v, tape.empty(q.shape, dtype))
        args.q, args.k_new, args.v_new, args.out = (x.data_ptr() for x in rows)
        args.q_stride, args.k_stride, args.v_stride = q.stride(0), k.stride(0), v.stride(0)
        args.k_cache, args.v_cache = self._caches[layer]
        args.heads, args.kv_heads, args.dim = q.shape[1], spec.num_kv_heads, spec.head_dim
        args.window, args.scale, args.cap = spec.window, softmax.scale, softmax.cap
        args.is_fp8, args.sinks = spec.fp8, None
        if softmax.sinks is not None:
            assert len(softmax.sinks) == q.shape[1], (softmax.sinks.shape, q.shape)
            args.sinks = softmax.sinks.data_ptr()
        return rows


def layout_of(pool: KVPool) -> dict[str, int]:
    return {
        "page_stride_bytes": pool.page_bytes,
        "unit_stride_bytes": pool.unit_bytes,
        "units": pool.units,
        "page_size": pool.page_size,
    }


def check_pages(pool: KVPool, *tables: torch.Tensor) -> None:
    """Assert valid page ids: C trusts them."""
    for pages in tables:
        low, high = pages.aminmax()
        assert int(low) >= 0 and int(high) <= pool.num_pages, (int(low), int(high))


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


# ---- Decode attention on CPU (paged_decode.c).

LANES = 16
DECODE_DTYPES = ("bfloat16", "float32")
QUERIES_OF_FP8 = "bfloat16"
_DECODE_TABLES = ("page_table", "kv_lens", "token_pages", "token_offsets", "rows", "requests", "groups", "shared")


class _Order(NamedTuple):
    rows: torch.Tensor
    requests: torch.Tensor
    groups: torch.Tensor
    shared: torch.Tensor


class _Step(ctypes.Structure):
    _fields_ = fields(
        (*_DECODE_TABLES, *PATHS),
        ("batch", "num_groups", "table_width", "path_width"),
    )


class _DecodeArgs(ctypes.Structure):
    _fields_ = fields((*POINTERS, "step"), (*STRIDES, *HEADS, "is_bf16", "is_fp8"), SCORES)


DECODE = CSource("paged_decode", {"paged_decode": _DecodeArgs})


class PagedDecode:
    """One pool's decode attention, one row per token; drops the GIL."""

    def __init__(self, library: ctypes.CDLL, pool: KVPool) -> None:
        self._call = library.tandem_paged_decode
        self._pool = pool
        self._layer = LayerCall(pool)
        self._step = _Step()  # recorded calls point here, too, and so read a new step
        self._args = _DecodeArgs(step=ctypes.addressof(self._step), **layout_of(pool))
        self._kept: tuple[torch.Tensor, ...] = ()  # keeps alive memory that _step points to
        self._paths: tuple[torch.Tensor, ...] = ()  # likewise

    def begin(self, step: StepBatch) -> None:
        table = step.page_rows(self._pool.page_size)
        kv_lens = torch.tensor(step.kv_lens, dtype=torch.int32)
        self._check(step, table)
        order = self._order(step, table)
        self._kept = (table, kv_lens, step.token_pages.contiguous(), step.token_offsets.contiguous(), *order)
        now = self._step
        for name, tensor in zip(_DECODE_TABLES, self._kept, strict=True):
            setattr(now, name, tensor.data_ptr())
        now.batch, now.num_groups, now.table_width = len(kv_lens), len(order.shared), table.stride(0)
        self._paths = fill_paths(now, step, positions=table.shape[1] * self._pool.page_size)

    def attend_rotated(
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
    if not all(spec.head_dim % LANES == 0 and spec.dtype in DECODE_DTYPES for spec in pool.specs):
        return None
    if any(spec.fp8 and spec.dtype != QUERIES_OF_FP8 for spec in pool.specs):
        return None
    return DECODE.open(lambda library: PagedDecode(library, pool))


# ---- Prompt attention on CPU (paged_extend.c).

DTYPE = "bfloat16"

_EXTEND_TABLES = ("page_table", "first_rows", "q_lens", "kv_lens", "groups", "shared", "token_pages", "token_offsets")
_NUMBERS = ("tokens", "requests", "num_groups", *HEADS, "is_fp8", "kind")


class _ExtendArgs(ctypes.Structure):
    _fields_ = fields((*POINTERS, *_EXTEND_TABLES), (*STRIDES, "table_width", *_NUMBERS), SCORES)


EXTEND = CSource("paged_extend", {"paged_extend": _ExtendArgs})


class PagedExtend:
    """Results depend only on position and KV. Drops the GIL."""

    def __init__(self, library: ctypes.CDLL, pool: KVPool) -> None:
        self._call = library.tandem_paged_extend
        self._pool = pool
        self._layer = LayerCall(pool)
        self._args = _ExtendArgs(kind=library.tandem_paged_extend_kind(), **layout_of(pool))
        self._kept: tuple[torch.Tensor, ...] = ()  # keeps alive memory that _args points to

    def begin(self, step: StepBatch, *, skip: frozenset[int] = frozenset()) -> None:
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
        for name, tensor in zip(_EXTEND_TABLES, self._kept, strict=False):
            setattr(args, name, tensor.data_ptr())
        args.table_width, args.num_groups = table.shape[1], len(shared)
        args.tokens, args.requests = len(step.token_pages), len(chosen)

    def attend_rotated(
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
    if not all(spec.head_dim % LANES == 0 and spec.dtype == DTYPE for spec in pool.specs):
        return None
    return EXTEND.open(lambda library: PagedExtend(library, pool))
