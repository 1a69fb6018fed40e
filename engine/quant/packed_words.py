"""Integers of 4 or 8 bits packed into 32-bit words."""

import torch
from torch import Tensor

IN_ORDER = {4: (0, 1, 2, 3, 4, 5, 6, 7), 8: (0, 1, 2, 3)}


def unpacked(words: Tensor, order: tuple[int, ...], taken: range) -> Tensor:
    """Unsigned [rows, len(taken)] int16 from `words` [rows, n] i32.

    A word's lowest bits are its integer order[0].
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
