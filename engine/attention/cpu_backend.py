"""CPU attention by C kernels for prompts and single tokens, or by torch.

A step may have both (`--enable-mixed-chunk`); a request's kernel does not depend on its batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention.torch_backend import TorchBackend
from engine.kernels.paged_decode import PagedDecode, make_paged_decode
from engine.kernels.paged_extend import PagedExtend, make_paged_extend
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.layers.rope import Unturned


class CpuBackend:
    def __init__(self, pool: KVPool) -> None:
        self._prompts: PagedExtend | TorchBackend = make_paged_extend(pool) or TorchBackend(pool)
        self._decode = make_paged_decode(pool)
        self._now: PagedDecode | PagedExtend | TorchBackend = self._prompts
        self._riders: torch.Tensor | None = None  # rows of single tokens in a step with prompts

    @property
    def has_kernel(self) -> bool:
        """Decode has the C kernel (torch is several times slower)."""
        return self._decode is not None

    @property
    def has_prompt_kernel(self) -> bool:
        """Prompts have the C kernel, which needs bf16."""
        return isinstance(self._prompts, PagedExtend)

    def begin(self, step: StepBatch) -> None:
        self._riders = None
        if self._decode is None:
            self._prompts.begin(step)
            return
        single = self._single(step)
        if len(single) == len(step.q_lens):
            self._now = self._decode
            self._decode.begin(step)
            return
        self._now = self._prompts
        self._prompts.begin(step, skip=frozenset(single))
        if single:
            spans = step.spans()
            self._riders = torch.tensor([spans[i][0] for i in single])
            self._decode.begin(_riders_of(step, single, self._riders))

    def _single(self, step: StepBatch) -> Sequence[int]:
        """Return the decode kernel's requests; a prompt's last token keeps the prompt kernel's
        bits.
        """
        if step.extend and step.riders is not None and self.has_prompt_kernel:
            return step.riders
        return [i for i, n in enumerate(step.q_lens) if n == 1]

    def attend(self, layer: int, new: Unturned) -> torch.Tensor:
        q, k, v = new.turned()
        out = self._now.attend_turned(layer, q, k, v, new.softmax)
        rows = self._riders
        if rows is not None and self._decode is not None:
            out[rows] = self._decode.attend_turned(layer, q[rows], k[rows], v[rows], new.softmax)
        return out


def _riders_of(step: StepBatch, requests: Sequence[int], rows: torch.Tensor) -> StepBatch:
    chosen = torch.tensor(requests)
    return replace(
        step,
        extend=False,
        q_lens=[1] * len(requests),
        kv_lens=[step.kv_lens[i] for i in requests],
        slots=step.slots[chosen],
        token_pages=step.token_pages[rows],
        token_offsets=step.token_offsets[rows],
        drafted=frozenset(n for n, i in enumerate(requests) if i in step.drafted),
        paths=None if step.paths is None else step.paths.of(chosen),
    )
