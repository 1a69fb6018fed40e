"""CPU attention: prompts by torch's SDPA over the gathered pages, single tokens by the C kernel where it was built.

A step may bring both (`--enable-mixed-chunk`): each request goes its own way, whoever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention.base import AttentionBackend, StepBatch
from engine.attention.torch_backend import TorchBackend
from engine.executor.kv_pool import KVPool
from engine.kernels.paged_decode import make_paged_decode


class CpuBackend:
    """`scale` multiplies q.k (default head_dim ** -0.5). Decode results do not depend on who else is in the batch."""

    def __init__(self, pool: KVPool, *, scale: float | None = None) -> None:
        self._torch = TorchBackend(pool, scale=scale)
        self._decode = make_paged_decode(pool, scale=scale)
        self._now: AttentionBackend = self._torch
        self._riders: torch.Tensor | None = None  # rows of single tokens in a step that has prompts too

    @property
    def has_kernel(self) -> bool:
        """Whether decode runs by the C kernel (else by torch, several times slower)."""
        return self._decode is not None

    def begin(self, step: StepBatch) -> None:
        self._riders = None
        if self._decode is None:
            self._torch.begin(step)
            return
        single = [i for i, n in enumerate(step.q_lens) if n == 1]
        if len(single) == len(step.q_lens):
            self._now = self._decode
            self._decode.begin(step)
            return
        self._now = self._torch
        self._torch.begin(step, skip=frozenset(single))
        if single:
            spans = step.spans()
            self._riders = torch.tensor([spans[i][0] for i in single])
            self._decode.begin(_riders_of(step, single, self._riders))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self._now.attend(layer, q, k, v)
        rows = self._riders
        if rows is not None and self._decode is not None:
            out[rows] = self._decode.attend(layer, q[rows], k[rows], v[rows])
        return out


def _riders_of(step: StepBatch, requests: Sequence[int], rows: torch.Tensor) -> StepBatch:
    return replace(
        step,
        extend=False,
        q_lens=[1] * len(requests),
        kv_lens=[step.kv_lens[i] for i in requests],
        page_table=step.page_table[torch.tensor(requests)],
        positions=step.positions[rows],
        token_pages=step.token_pages[rows],
        token_offsets=step.token_offsets[rows],
    )
