"""Recurrences S <- e^decay S + k u^T, o = S^T q in torch, for prompts: `GRID` tokens at a time, as products.

A prompt has the same bits wherever it is cut at a multiple of `GRID`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GRID = 64


class Decays(NamedTuple):
    """`total` [heads, GRID]: the logarithms up to each token. `between` [heads, GRID, GRID]: what is left at row i of column j <= i."""

    total: Tensor
    between: Tensor


def decays_of(decay: Tensor) -> Decays:
    """`decay` [heads, GRID]: logarithms, at most 0.

    Sums are float64: behind one strong decay two sums of fp32 hold too few digits of the weak ones between them.
    """
    total = decay.double().cumsum(1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).float()
    return Decays(total.float(), between.tril().exp().tril())


def advance(q: Tensor, k: Tensor, added: Tensor, decays: Decays, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [heads, GRID, values] of a chunk, and the state [heads, keys, values] behind it.

    q, k [heads, GRID, keys]; `added` [heads, GRID, values]: u of each token.
    """
    total, between = decays
    output = (q * total.exp().unsqueeze(-1)) @ state + (q @ k.transpose(1, 2) * between) @ added
    left = between[:, -1, :, None]
    return output, state * total[:, -1, None, None].exp() + (k * left).transpose(1, 2) @ added


Chunk = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor]]


def in_chunks(rows: tuple[Tensor, ...], state: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The outputs [n, heads, values] of n tokens, and the state behind them.

    `rows`: [n, heads, ...] each; `chunk` gets `GRID` of them, heads first. Zeros behind the last must change nothing.
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
