"""Inputs of MLA attention backends, and per-head products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.linear import PackedMatrices, linear_kernel
from engine.layers.linear import RMSNorm
from engine.layers.rope import Turn, apply_rope

Scores = Callable[[int, int], Tensor]  # (first row, end) -> [n, kv_len] fp32
SCORES_AT_ONCE = 1 << 24  # of the index, rows * heads * tokens: 64 MiB


@dataclass(frozen=True, slots=True)
class TokenChooser:
    """Chooses the tokens that new ones attend to (DeepSeek V3.2).

    q [T, heads, dim], weights [T, heads] fp32: of the index. Score: sum over heads of weight *
    relu(q . key); the key is the last `dim` elements of a cache entry.
    """

    q: Tensor
    weights: Tensor
    chosen: int

    def mask(self, rows: slice, keys: Tensor) -> Tensor:
        """[n, kv_len] bool: tokens visible to the last n rows; keys [kv_len, dim].

        Ties go to the earlier token.
        """
        return self._mask(rows, len(keys), self.scores(keys))

    def scores(self, keys: Tensor) -> Scores:
        floats = keys.float()

        def of_rows(first: int, end: int) -> Tensor:
            products = torch.einsum("thd,kd->thk", self.q[first:end].float(), floats).relu_()
            return torch.einsum("thk,th->tk", products, self.weights[first:end])

        return of_rows

    def tokens(self, rows: slice, kv_len: int, scores: Scores) -> Tensor:
        """[n, chosen] i32, ascending: the tokens of `mask`. Rows with fewer get 0, 1, ... first."""
        count, before = rows.stop - rows.start, kv_len - (rows.stop - rows.start)
        few = min(count, max(0, self.chosen - before))  # rows that see all tokens, no more than `chosen`
        found = torch.arange(self.chosen, dtype=torch.int32, device=self.q.device).repeat(count, 1)
        if few < count:
            mask = self._mask(slice(rows.start + few, rows.stop), kv_len, scores)
            found[few:] = mask.nonzero()[:, 1].view(-1, self.chosen)
        return found

    def _mask(self, rows: slice, kv_len: int, scores: Scores) -> Tensor:
        before = kv_len - (rows.stop - rows.start)
        step = max(1, SCORES_AT_ONCE // (self.q.shape[1] * kv_len))
        starts = range(rows.start, rows.stop, step)
        return torch.cat(
            [self._part(at, min(at + step, rows.stop), before + at - rows.start, kv_len, scores) for at in starts]
        )

    def _part(self, first: int, end: int, before: int, kv_len: int, scores: Scores) -> Tensor:
        positions = torch.arange(before, before + end - first, device=self.q.device)[:, None]
        seen = torch.arange(kv_len, device=self.q.device)[None] <= positions
        if before + end - first <= self.chosen:
            return seen
        found = scores(first, end).masked_fill_(~seen, -torch.inf)
        found.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # a broken token is chosen last
        worst = found.topk(self.chosen, sorted=False).values.amin(1, keepdim=True)
        better, equal = found > worst, found == worst
        room = self.chosen - better.sum(1, keepdim=True)
        return (better | (equal & (equal.cumsum(1) <= room))) & seen


@dataclass(frozen=True, slots=True)
class RotatedLatents:
    """New tokens after RoPE. q [T, heads, dim]: absorbed, scores are `scale` * q . latent.

    latents [T, width]: K of all heads, V in the first `rank` elements, perhaps more for `chooser`.
    A backend returns [T, heads * rank].
    """

    q: Tensor
    latents: Tensor
    scale: float
    chooser: TokenChooser | None = None


@dataclass(frozen=True, slots=True)
class NewLatents:
    """New tokens before norm and RoPE. Rotate once only, because it completes q.

    q [T, heads, rank + rope_dim]: its last elements are not set; rotary [T, heads, rope_dim].
    latents [T, rank + rope_dim]: `norm` takes the first, RoPE the last. index: key [T, dim], and
    what it is for.
    """

    q: Tensor
    rotary: Tensor
    latents: Tensor
    norm: RMSNorm
    turn: Turn
    scale: float
    index: tuple[Tensor, TokenChooser] | None = None

    def rotated(self) -> RotatedLatents:
        rope_dim = self.rotary.shape[2]
        kept, key = self.latents.split([self.latents.shape[1] - rope_dim, rope_dim], dim=1)
        both = apply_rope(torch.cat((self.rotary, key.unsqueeze(1)), 1), *self.turn)
        self.q[:, :, self.q.shape[2] - rope_dim :] = both[:, :-1]
        latents, chooser = [self.norm.of_columns(kept), both[:, -1]], None
        if self.index is not None:
            index_key, chooser = self.index
            latents.append(index_key)
        return RotatedLatents(self.q, torch.cat(latents, 1), self.scale, chooser)


class HeadProducts:
    """y[t, h] = matrices[h] x[t, h]; each [out, in]. Empties the list.

    With our kernel a row's bits do not depend on others.
    """

    def __init__(self, matrices: list[Tensor]) -> None:
        first, self._heads, self._size = matrices[0], len(matrices), len(matrices[0])
        kernel = linear_kernel() if first.device.type == "cpu" and first.dtype == torch.bfloat16 else None
        self._packed = None if kernel is None else PackedMatrices(kernel, matrices)
        self._weights = None if kernel is not None else torch.stack([matrix.t() for matrix in matrices])
        matrices.clear()

    def __call__(self, x: Tensor, *, room: int = 0) -> Tensor:
        """[T, heads, out + room] for x [T, heads, in]; the last `room` elements are not set."""
        y = torch.empty((len(x), self._heads, self._size + room), dtype=x.dtype, device=x.device)
        by_head, into = x.transpose(0, 1), y[:, :, : self._size].transpose(0, 1)
        if self._packed is None:
            assert self._weights is not None
            torch.bmm(by_head, self._weights, out=into)
        else:
            rows = torch.full((self._heads,), len(x), dtype=torch.int64)
            into.copy_(self._packed.times(by_head.reshape(-1, x.shape[2]), rows).view(into.shape))
        return y
