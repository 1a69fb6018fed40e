"""Strided views of a pool's tokens: equal layers form one view, so few kernels copy a whole token."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch

from engine.kv.cache_spec import TAIL, CacheSpec, layer_offsets

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class LikeLayers(NamedTuple):
    """`rows` of a token, `row_bytes` each, `apart` bytes apart, from byte `begin` of a unit."""

    begin: int
    row_bytes: int
    rows: int = 1
    apart: int = 0

    def with_row(self, begin: int, row_bytes: int) -> "LikeLayers | None":
        """Extend the run, or None if it does not continue."""
        apart = self.apart or begin - self.begin
        if row_bytes != self.row_bytes or begin != self.begin + self.rows * apart:
            return None
        return self._replace(rows=self.rows + 1, apart=apart)


def like_layers(parts: Sequence[CacheSpec], page_size: int) -> list[LikeLayers]:
    runs = list[LikeLayers]()
    for part, at in zip(parts, layer_offsets(parts, page_size), strict=True):
        if part.drafter == TAIL:
            continue
        row_bytes = part.num_kv_heads * part.row_bytes()
        for begin in (at,) if part.latent else (at, at + part.v_offset(page_size)):
            if runs and (longer := runs[-1].with_row(begin, row_bytes)):
                runs[-1] = longer
            else:
                runs.append(LikeLayers(begin, row_bytes))
    return runs


def token_rows(
    buffer: torch.Tensor, run: LikeLayers, *, num_pages: int, page_size: int, units: int, page_bytes: int
) -> torch.Tensor:
    """View as [num_pages, units, rows, page_size, words], in the largest words."""
    strides = (page_bytes, page_bytes // units, run.apart, run.row_bytes)
    word = gcd(max(WORDS), run.begin, *strides)
    return buffer.view(WORDS[word]).as_strided(
        (num_pages, units, run.rows, page_size, run.row_bytes // word),
        (*(stride // word for stride in strides), 1),
        run.begin // word,
    )
