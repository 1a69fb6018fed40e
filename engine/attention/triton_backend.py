"""GPU attention by Triton: split-KV decode and extend over pages. Nothing here waits for the device."""

from itertools import accumulate

import torch

from engine.attention.base import StepBatch
from engine.executor.kv_pool import KVPool
from engine.executor.upload import upload
from engine.kernels.triton_decode import decode
from engine.kernels.triton_extend import extend


class TritonBackend:
    """`scale` multiplies q.k (default head_dim ** -0.5). K and V of the new tokens are written first, then read back."""

    def __init__(self, pool: KVPool, *, scale: float | None = None) -> None:
        self._pool = pool
        self._scale = scale
        self._step: StepBatch | None = None
        self._page_table = self._starts = self._kv_lens = torch.empty(0, dtype=torch.int32)

    def begin(self, step: StepBatch) -> None:
        self._step = step
        self._page_table = step.page_table.to(torch.int32)
        if self._page_table.stride(-1) != 1:
            self._page_table = self._page_table.contiguous()
        self._kv_lens = self._upload(list(step.kv_lens))
        if step.extend:
            self._starts = self._upload([0, *accumulate(step.q_lens)])

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step = self._step
        assert step is not None, "begin() comes first"
        self._pool.write(layer, step.token_pages, step.token_offsets, k, v)
        cache_k, cache_v = self._pool.k(layer), self._pool.v(layer)
        scale = self._scale if self._scale is not None else float(q.shape[-1] ** -0.5)
        rows = q.to(cache_k.dtype).contiguous()
        if step.extend:
            out = extend(
                rows,
                cache_k,
                cache_v,
                page_table=self._page_table,
                starts=self._starts,
                kv_lens=self._kv_lens,
                most_rows=max(step.q_lens),
                scale=scale,
            )
        else:
            out = decode(
                rows,
                cache_k,
                cache_v,
                page_table=self._page_table,
                kv_lens=self._kv_lens,
                longest=max(step.kv_lens),
                scale=scale,
            )
        return out.flatten(1).to(q.dtype)

    def _upload(self, values: list[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int32), self._pool.device)
