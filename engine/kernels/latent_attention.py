"""MLA attention on CPU (latent_attention.c), for prompts and single tokens."""

import ctypes
from itertools import accumulate

import torch

from engine.kernels import tape
from engine.kernels.build import CSource, fields
from engine.kernels.paged_attention import PATHS, check_pages, fill_paths
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch

LANES = 16
DTYPES = ("bfloat16", "float32")


class _Step(ctypes.Structure):
    _fields_ = fields(
        ("page_table", "kv_lens", "starts", "token_pages", "token_offsets", *PATHS),
        ("batch", "table_width", "path_width"),
    )


class _Args(ctypes.Structure):
    _fields_ = fields(
        ("q", "latents", "out", "cache", "chosen", "step"),
        (
            "page_stride_bytes",
            "heads",
            "dim",
            "width",
            "rank",
            "page_size",
            "chosen_stride",
            "is_bf16",
        ),
        ("scale",),
    )


class _Scores(ctypes.Structure):
    _fields_ = fields(
        ("q", "weights", "keys", "pages", "out"),
        ("rows", "heads", "dim", "tokens", "page_stride_bytes", "row_bytes", "page_size", "is_bf16"),
    )


SOURCE = CSource("latent_attention", {"latent_attention": _Args, "index_scores": _Scores})


class LatentKernel:
    """One pool's MLA attention; a row has the same bits in any step or chunk."""

    def __init__(self, library: ctypes.CDLL, pool: KVPool) -> None:
        self._call = library.tandem_latent_attention
        self._scores = library.tandem_index_scores
        self._pool = pool
        self._caches = [pool.k(layer).data_ptr() for layer in range(pool.num_layers)]
        self._step = _Step()
        self._args = _Args(
            step=ctypes.addressof(self._step), page_stride_bytes=pool.page_bytes, page_size=pool.page_size
        )
        self._kept: tuple[torch.Tensor, ...] = ()  # keeps alive memory that _step points to
        self._paths: tuple[torch.Tensor, ...] = ()  # likewise

    def begin(self, step: StepBatch) -> None:
        table = step.page_rows(self._pool.page_size)
        kv_lens = torch.tensor(step.kv_lens, dtype=torch.int32)
        starts = torch.tensor([0, *accumulate(step.q_lens)], dtype=torch.int32)
        check_pages(self._pool, table, step.token_pages)
        assert all(0 < q <= kv for q, kv in zip(step.q_lens, step.kv_lens, strict=True)), (step.q_lens, step.kv_lens)
        assert max(step.kv_lens) <= table.shape[1] * self._pool.page_size, step.kv_lens
        assert int(starts[-1]) == len(step.token_pages) == len(step.token_offsets), step.q_lens
        self._kept = (table, kv_lens, starts, step.token_pages.contiguous(), step.token_offsets.contiguous())
        now = self._step
        now.page_table, now.kv_lens, now.starts, now.token_pages, now.token_offsets = (x.data_ptr() for x in self._kept)
        now.batch, now.table_width = len(kv_lens), table.stride(0)
        self._paths = fill_paths(now, step, positions=table.shape[1] * self._pool.page_size)

    def attend(
        self, layer: int, q: torch.Tensor, latents: torch.Tensor, *, scale: float, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write latents [T, width], return [T, heads * rank] for q [T, heads, dim], dim <= width.

        `chosen` i32[T, n]: ascending tokens that each row attends to, by default all. The result
        has the bits of a context of just these.
        """
        spec, dtype, args = self._pool.specs[layer], self._pool.k(layer).dtype, self._args
        rows, new = q.to(dtype).contiguous(), latents.to(dtype).contiguous()
        assert len(rows) == len(new) == len(self._kept[3]), (q.shape, latents.shape)
        assert rows.shape[2] <= new.shape[1] == spec.head_dim and rows.shape[2] % LANES == 0, (q.shape, latents.shape)
        if chosen is not None:
            assert chosen.dtype == torch.int32 and chosen.is_contiguous() and len(chosen) == len(rows), chosen.shape
            assert (chosen >= 0).all(), "a token before the first"
        out = tape.empty((len(rows), rows.shape[1] * spec.latent), dtype)
        args.q, args.latents, args.out = rows.data_ptr(), new.data_ptr(), out.data_ptr()
        args.cache, args.heads, args.dim, args.rank = self._caches[layer], rows.shape[1], rows.shape[2], spec.latent
        args.width = spec.head_dim
        args.chosen, args.chosen_stride = (None, 0) if chosen is None else (chosen.data_ptr(), chosen.stride(0))
        args.is_bf16, args.scale = dtype == torch.bfloat16, scale
        if tape.call(self._call, args):
            raise MemoryError("latent attention: no memory for the sums of one tile")
        return out.to(q.dtype)

    def index_scores(self, layer: int, request: int, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return scores float32[n, kv_len] of cached keys for n rows (see `TokenChooser`).

        q [n, heads, dim], weights float32[n, heads].
        """
        spec, k = self._pool.specs[layer], self._pool.k(layer)
        table, kv_lens = self._kept[:2]
        rows, tokens, size = q.to(k.dtype).contiguous(), int(kv_lens[request]), k.element_size()
        assert q.shape[2] == spec.index and weights.shape == q.shape[:2] and weights.dtype == torch.float32, q.shape
        weights = weights.contiguous()
        out = torch.empty((len(rows), tokens), dtype=torch.float32)
        args = _Scores(
            q=rows.data_ptr(),
            weights=weights.data_ptr(),
            keys=self._caches[layer] + (spec.head_dim - spec.index) * size,
            pages=table[request].data_ptr(),
            out=out.data_ptr(),
            rows=len(rows),
            heads=rows.shape[1],
            dim=spec.index,
            tokens=tokens,
            page_stride_bytes=self._pool.page_bytes,
            row_bytes=spec.head_dim * size,
            page_size=self._pool.page_size,
            is_bf16=k.dtype == torch.bfloat16,
        )
        tape.call_once(self._scores, args)
        return out


def make_latent_kernel(pool: KVPool) -> LatentKernel | None:
    """Return None without a compiler (logged), or for unsuitable sizes."""
    sizes = {size for spec in pool.specs for size in (spec.head_dim, spec.latent, spec.index)}
    if any(size % LANES for size in sizes) or not all(spec.dtype in DTYPES and not spec.fp8 for spec in pool.specs):
        return None
    return SOURCE.open(lambda library: LatentKernel(library, pool))
