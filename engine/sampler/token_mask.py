"""Bitmasks of allowed tokens on logits: a grammar's device part."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kv.step_batch import upload

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Rows int64[m] with `bits` int32[m, ceil(V / 32)]: bit t % 32 of word t // 32 allows t."""

    rows: Tensor
    bits: Tensor

    def apply(self, logits: Tensor, *, fallback: Tensor) -> Tensor:
        """Return a copy of `logits` [n, V] with -inf for forbidden tokens.

        If min_new_tokens has banned all allowed tokens, the row comes from `fallback`.
        """
        allowed = self._allowed(logits.shape[1])
        masked = logits[self.rows].masked_fill(~allowed, -torch.inf)
        if fallback is not logits:
            left = masked.amax(-1, keepdim=True) > -torch.inf
            masked = torch.where(left, masked, fallback[self.rows].masked_fill(~allowed, -torch.inf))
        return masked if len(masked) == len(logits) else logits.index_copy(0, self.rows, masked)

    def _allowed(self, vocab_size: int) -> Tensor:
        if self.bits.device.type == "cpu":
            unpacked = np.unpackbits(self.bits.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(unpacked).view(torch.bool)
        return unpacked_on_device(self.bits, vocab_size)


def unpacked_on_device(bits: Tensor, vocab_size: int) -> Tensor:
    """bool[m, vocab_size]."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size].bool()


def token_mask(masks: Mapping[int, bytes], *, device: torch.device) -> TokenMask | None:
    if not masks:
        return None
    assert list(masks) == sorted(masks)
    rows = torch.tensor(list(masks), dtype=torch.int64)
    bits = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.int32).view(len(masks), -1)
    return TokenMask(upload(rows, device), upload(bits, device))
