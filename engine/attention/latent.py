"""Latent attention (MLA) without Triton: plain torch, C kernels on a CPU, tokens of an index."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.torch_backend import TorchBackend
from engine.kernels.latent_attention import LatentKernel
from engine.kernels.paged_attention import Softmax
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.layers.latents import NewLatents, RotatedLatents, Scores, TokenChooser

# ---- MLA attention in plain torch, for any dtype and device: slow; the kernel's reference.


class TorchLatents:
    """One KV head with V = K, cut to the first `rank` elements of results."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._torch = TorchBackend(pool)

    def begin(self, step: StepBatch) -> None:
        self._torch.begin(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        rotated = new.rotated()
        latents = rotated.latents.unsqueeze(1)
        sums = self._torch.attend_rotated(layer, rotated.q, latents, latents, Softmax(new.scale))
        return sums.view(new.q.shape)[:, :, : self._pool.specs[layer].latent].flatten(1)


# ---- MLA attention to tokens chosen by an index (DeepSeek V3.2), on any device.


class SparseLatents:
    def __init__(self, pool: KVPool, kernel: LatentKernel | None) -> None:
        self._pool = pool
        self._kernel = kernel
        self._step: StepBatch | None = None

    def begin(self, step: StepBatch) -> None:
        assert step.paths is None, "an index chooses among tokens at their own positions"
        self._step = step
        self._pages = step.page_rows(self._pool.page_size)
        if self._kernel is not None:
            self._kernel.begin(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        step, rotated = self._step, new.rotated()
        chooser = rotated.chooser
        assert step is not None and chooser is not None, "begin() comes first"
        sparse = max(step.kv_lens) > chooser.chosen
        if sparse or self._kernel is None:
            kept = rotated.latents.unsqueeze(1)
            self._pool.write(layer, step.token_pages, step.token_offsets, kept, kept)
        if self._kernel is not None:
            chosen = self._tokens(self._kernel, layer, chooser) if sparse else None
            return self._kernel.attend(layer, rotated.q, rotated.latents, scale=new.scale, chosen=chosen)
        out = [self._attend(layer, i, rotated, slice(*span), chooser) for i, span in enumerate(step.spans())]
        return torch.cat(out)[:, :, : self._pool.specs[layer].latent].flatten(1)

    def _tokens(self, kernel: LatentKernel, layer: int, chooser: TokenChooser) -> torch.Tensor:
        step = self._step
        assert step is not None

        def of(request: int) -> Scores:
            return lambda first, end: kernel.index_scores(
                layer, request, chooser.q[first:end], chooser.weights[first:end]
            )

        spans = zip(step.spans(), step.kv_lens, strict=True)
        return torch.cat([chooser.tokens(slice(*span), kv_len, of(i)) for i, (span, kv_len) in enumerate(spans)])

    def _kept(self, layer: int, request: int) -> torch.Tensor:
        assert self._step is not None
        kv_len = self._step.kv_lens[request]
        pages = self._pages[request, : -(-kv_len // self._pool.page_size)]
        return self._pool.k(layer).index_select(0, pages).flatten(0, 2)[:kv_len]

    def _attend(
        self, layer: int, request: int, new: RotatedLatents, rows: slice, chooser: TokenChooser
    ) -> torch.Tensor:
        kept, dim = self._kept(layer, request), new.q.shape[2]
        keys, mask = kept[None, None, :, :dim].to(new.q.dtype), chooser.mask(rows, kept[:, dim:])
        q = new.q[rows].transpose(0, 1)[None]
        out = scaled_dot_product_attention(q, keys, keys, attn_mask=mask, scale=new.scale, enable_gqa=True)
        return out[0].transpose(0, 1)


# ---- MLA attention on CPU by the C kernel.


class CpuLatents:
    """Prompts and decodes alike: recomputed KV has the same bits."""

    def __init__(self, kernel: LatentKernel) -> None:
        self._kernel = kernel

    def begin(self, step: StepBatch) -> None:
        self._kernel.begin(step)

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:
        rotated = new.rotated()
        return self._kernel.attend(layer, rotated.q, rotated.latents, scale=new.scale)
