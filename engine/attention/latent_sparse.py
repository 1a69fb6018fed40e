"""Latent attention to the tokens that an index chooses (DeepSeek V3.2), on any device.

The C kernel, where there is one, reads all latents and weighs the chosen: what the others cost is not saved yet.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.latent_attention import LatentKernel
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.layers.latents import NewLatents


class SparseLatents:
    """`kernel`: None where torch attends. Keys of the index lie behind the latents of each token."""

    def __init__(self, pool: KVPool, kernel: LatentKernel | None) -> None:
        self._pool = pool
        self._kernel = kernel
        self._step: StepBatch | None = None

    def begin(self, step: StepBatch) -> None:
        self._step = step
        self._pages = step.page_rows(self._pool.page_size)
        if self._kernel is not None:
            self._kernel.begin(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        """[T, heads * rank]."""
        step, chooser = self._step, new.chooser
        assert step is not None and chooser is not None, "begin() comes first"
        chosen = None
        if max(step.kv_lens) > chooser.chosen or self._kernel is None:
            kept = new.latents.unsqueeze(1)
            self._pool.write(layer, step.token_pages, step.token_offsets, kept, kept)
            chosen = self._chosen(layer, new)
        if self._kernel is not None:
            return self._kernel.attend(layer, new.q, new.latents, scale=new.scale, chosen=chosen)
        assert chosen is not None
        out = [
            self._attend(new, rows, self._latents(layer, i), chosen[rows])
            for i, rows in enumerate(slice(*span) for span in step.spans())
        ]
        return torch.cat(out)[:, :, : self._pool.specs[layer].latent].flatten(1)

    def _chosen(self, layer: int, new: NewLatents) -> torch.Tensor:
        """[T, longest kv_len] bool."""
        step, chooser = self._step, new.chooser
        assert step is not None and chooser is not None
        chosen = torch.zeros(len(new.q), max(step.kv_lens), dtype=torch.bool, device=new.q.device)
        for i, (span, kv_len) in enumerate(zip(step.spans(), step.kv_lens, strict=True)):
            rows = slice(*span)
            chosen[rows, :kv_len] = chooser.mask(rows, self._latents(layer, i)[:, new.q.shape[2] :])
        return chosen

    def _latents(self, layer: int, request: int) -> torch.Tensor:
        """[kv_len, width]."""
        assert self._step is not None
        kv_len = self._step.kv_lens[request]
        pages = self._pages[request, : -(-kv_len // self._pool.page_size)]
        return self._pool.k(layer).index_select(0, pages).flatten(0, 2)[:kv_len]

    def _attend(self, new: NewLatents, rows: slice, latents: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[n, heads, dim] of one request."""
        keys = latents[None, None, :, : new.q.shape[2]].to(new.q.dtype)
        q, mask = new.q[rows].transpose(0, 1)[None], chosen[:, : len(latents)]
        out = scaled_dot_product_attention(q, keys, keys, attn_mask=mask, scale=new.scale, enable_gqa=True)
        return out[0].transpose(0, 1)
