"""Common arguments of both paged attention kernels."""

import ctypes
from typing import NamedTuple

import torch

from engine.kernels import tape
from engine.kernels.softmax import Softmax
from engine.kv.kv_pool import DTYPES, KVPool

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
