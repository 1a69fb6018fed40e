"""Integers of 4 or 8 bits packed into words of 32."""

import torch
from torch import Tensor

IN_ORDER = {4: (0, 1, 2, 3, 4, 5, 6, 7), 8: (0, 1, 2, 3)}


def unpacked(words: Tensor, order: tuple[int, ...], taken: range) -> Tensor:
    """Unsigned integers [rows, len(taken)] int16, those that are number `taken` of rows of `words` [rows, n] int32.

    The lowest bits of a word are its integer number order[0].
    """
    each = len(order)
    first, end = taken.start // each, -(-taken.stop // each)
    bits = 32 // each
    own = words[:, first:end]
    parts: list[Tensor] = [own] * each
    for place, number in enumerate(order):
        parts[number] = (own >> bits * place) & ((1 << bits) - 1)
    together = torch.stack(parts, dim=-1).flatten(1).to(torch.int16)
    return together[:, taken.start - first * each : taken.stop - first * each]
