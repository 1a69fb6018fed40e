"""Choice of a sampler, without importing a missing Triton."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.core.plan import SlotOpen
from engine.sampler.sampler import Sampler
from engine.sampler.token_mask import TokenMask

NOT_SAMPLED = -1  # an output_len


class TokenSampler(Protocol):
    def open(self, slot: SlotOpen) -> None: ...

    def close(self, slot: int) -> None: ...

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        output_lens: Sequence[int],
        *,
        mask: TokenMask | None = None,
        drafts: Sequence[int | None] = (),
    ) -> tuple[Tensor, Tensor]: ...

    def guess(self, logits: Tensor, slots: Sequence[int], output_lens: Sequence[int]) -> Tensor: ...


@runtime_checkable
class CapturableSampler(TokenSampler, Protocol):
    """Sampler with capturable calls: it reads nothing on the host."""

    def sample_on_device(self, logits: Tensor, slots: Tensor, output_lens: Tensor) -> tuple[Tensor, Tensor]:
        """`sample` with int64[n] on the device; NOT_SAMPLED rows give 0."""


def make_sampler(*, num_slots: int, vocab_size: int, device: torch.device, in_graphs: bool = False) -> TokenSampler:
    """Make Triton's sampler on GPUs; all give the same tokens."""
    if in_graphs or (device.type == "cuda" and find_spec("triton") is not None):
        from engine.sampler.triton_sampler import TritonSampler

        return TritonSampler(num_slots=num_slots, vocab_size=vocab_size, device=device)
    return Sampler(num_slots=num_slots, vocab_size=vocab_size, device=device)
