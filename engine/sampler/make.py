"""The choice of a sampler, which imports no Triton where it may be missing."""

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
    """`Sampler` says what the calls mean."""

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
    """A sampler whose calls can be captured: it reads nothing on the host."""

    def sample_on_device(self, logits: Tensor, slots: Tensor, output_lens: Tensor) -> tuple[Tensor, Tensor]:
        """As `sample`, with slots and output_lens [n] int64 on the device; a row of NOT_SAMPLED gives 0."""


def make_sampler(*, num_slots: int, vocab_size: int, device: torch.device, in_graphs: bool = False) -> TokenSampler:
    """Triton's on a GPU, if it is installed; all give the same tokens from the same logits. `in_graphs`: Triton's anyway."""
    if in_graphs or (device.type == "cuda" and find_spec("triton") is not None):
        from engine.sampler.triton_sampler import TritonSampler

        return TritonSampler(num_slots=num_slots, vocab_size=vocab_size, device=device)
    return Sampler(num_slots=num_slots, vocab_size=vocab_size, device=device)
