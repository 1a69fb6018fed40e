"""The interface of attention backends: what a step gives them and what they must do with it."""

from typing import Protocol, runtime_checkable

import torch

from engine.kv.step_batch import DeviceStep, StepBatch


class AttentionBackend(Protocol):
    """The caller calls `begin` once a step, then `attend` once for each layer, on one thread or stream."""

    def begin(self, step: StepBatch) -> None:
        """Take in a step: whatever all layers share is computed here, once."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k, v of the new tokens to the pool, then attend causally over each request's kv_len tokens.

        q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim]. Returns [T, num_heads * head_dim] in q's dtype.
        Query head h reads kv head h // (num_heads // num_kv_heads).
        """


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured: it looks at no length, so the same kernels serve every step."""

    def begin_on_device(self, step: DeviceStep) -> None:
        """As `begin`. What is computed here and in `attend` is a function of the tensors' contents alone."""
