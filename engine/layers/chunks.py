"""Chunked recurrences S <- e^decay S + k u^T, o = S^T q in torch, for prefill.

Bits do not depend on cuts at multiples of `GRID`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GRID = 64


class Decays(NamedTuple):
    """Decays between the rows of a chunk.

    `total` [heads, GRID]: cumulative logs. `between` [heads, GRID, GRID]: decay from column to row.
    """

    total: Tensor
    between: Tensor


def decays_of(decay: Tensor) -> Decays:
    """The decays of a chunk. `decay` [heads, GRID]: logarithms, at most 0.

    Sums are float64: after a strong decay fp32 loses digits of weak ones.
    """
    total = decay.double().cumsum(1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).float()
    return Decays(total.float(), between.tril().exp().tril())


def advance(q: Tensor, k: Tensor, added: Tensor, decays: Decays, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [heads, GRID, values] and the next state [heads, keys, values].

    q, k [heads, GRID, keys]; `added` [heads, GRID, values]: u of each token.
    """
    total, between = decays
    output = (q * total.exp().unsqueeze(-1)) @ state + (q @ k.transpose(1, 2) * between) @ added
    left = between[:, -1, :, None]
    return output, state * total[:, -1, None, None].exp() + (k * left).transpose(1, 2) @ added


Chunk = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor]]


def in_chunks(rows: tuple[Tensor, ...], state: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Return outputs [n, heads, values] and the next state.

    `rows`: [n, heads, ...] each; `chunk` gets `GRID`, heads first, zero-padded.
    """
    count = len(rows[0])
    parts = []
    for x in rows:
        padded = functional.pad(x.transpose(0, 1), (*(0, 0) * (x.dim() - 2), 0, -count % GRID))
        parts.append(torch.split(padded, GRID, dim=1))
    outputs = []
    for of_chunk in zip(*parts, strict=True):
        output, state = chunk(of_chunk, state)
        outputs.append(output)
    return torch.cat(outputs, 1)[:, :count].transpose(0, 1), state
