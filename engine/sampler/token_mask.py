"""Applies bitmasks of allowed tokens to logits: the device's half of a grammar."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kv.upload import upload

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMask:
    """`rows` [m] int64 of a batch and, for each, `bits` [m, ceil(V / 32)] int32: bit t % 32 of word t // 32 allows t."""

    rows: Tensor
    bits: Tensor

    def apply(self, logits: Tensor, *, fallback: Tensor) -> Tensor:
        """Return a copy of `logits` [n, V] where forbidden tokens are -inf.

        Where an edit (min_new_tokens) has banned all that the grammar allows, the row comes from `fallback`.
        """
        allowed = self._allowed(logits.shape[1])
        masked = logits[self.rows].masked_fill(~allowed, -torch.inf)
        if fallback is not logits:
            left = masked.amax(-1, keepdim=True) > -torch.inf
            masked = torch.where(left, masked, fallback[self.rows].masked_fill(~allowed, -torch.inf))
        return masked if len(masked) == len(logits) else logits.index_copy(0, self.rows, masked)

    def _allowed(self, vocab_size: int) -> Tensor:
        """Return [m, vocab_size] bool. On CPU numpy unpacks a row in microseconds."""
        if self.bits.device.type == "cpu":
            unpacked = np.unpackbits(self.bits.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(unpacked).view(torch.bool)
        return unpacked_on_device(self.bits, vocab_size)


def unpacked_on_device(bits: Tensor, vocab_size: int) -> Tensor:
    """Return [m, vocab_size] bool of bits [m, ceil(vocab_size / 32)] int32."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size].bool()


def token_mask(masks: Mapping[int, bytes], *, device: torch.device) -> TokenMask | None:
    """`masks`: bitmask of each constrained row of the batch, in row order."""
    if not masks:
        return None
    assert list(masks) == sorted(masks)
    rows = torch.tensor(list(masks), dtype=torch.int64)
    bits = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.int32).view(len(masks), -1)
    return TokenMask(upload(rows, device), upload(bits, device))
