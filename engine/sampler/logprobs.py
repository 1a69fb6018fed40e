"""Logprobs of the unedited model output: one call and host copy per step."""

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class Logprobs:
    """Host views of n rows, best first, valid after the step's event; top_* are [n, k]."""

    token_ids: IntArray
    chosen: FloatArray
    top_values: FloatArray
    top_ids: IntArray
    requested_ids: tuple[int, ...]
    requested: FloatArray


def packed_logprobs(logits: Tensor, tokens: Tensor, *, top_num: int, token_ids: Tensor) -> Tensor:
    """int32[n, 2 + 2 * min(top_num, V) + r] for `Packed`.

    logits float32[n, V]; tokens int64[n]; token_ids int64[n, r] are the requested ones.
    """
    norms = log_norms(logits)[:, None]
    top = logits.topk(min(top_num, logits.shape[1]), dim=-1)
    values = torch.cat([logits.gather(1, tokens[:, None]), top.values, logits.gather(1, token_ids)], 1) - norms
    return torch.cat([tokens[:, None].int(), top.indices.int(), values.view(torch.int32)], 1)


class Packed:
    def __init__(self, table: Tensor, *, most: int) -> None:
        self._ids: IntArray = table.numpy()  # shares memory: a copy from the GPU may be in flight
        self._values: FloatArray = self._ids.view(np.float32)
        self._most = most

    def rows(self, begin: int, end: int, *, top_num: int, requested_ids: tuple[int, ...]) -> Logprobs:
        ids, values = self._ids[begin:end], self._values[begin:end, 1 + self._most :]
        return Logprobs(
            token_ids=ids[:, 0],
            chosen=values[:, 0],
            top_values=values[:, 1 : 1 + min(top_num, self._most)],
            top_ids=ids[:, 1 : 1 + min(top_num, self._most)],
            requested_ids=requested_ids,
            requested=values[:, 1 + self._most : 1 + self._most + len(requested_ids)],
        )


def log_norms(logits: Tensor) -> Tensor:
    """logsumexp [n] of logits [n, V], with equal bits in any batch.

    Row by row, as torch splits a sum by the number of rows.
    """
    if logits.device.type != "cpu" and find_spec("triton") is not None:
        from engine.kernels.triton.sample import log_norms as by_triton

        return by_triton(logits)
    return torch.cat([row.logsumexp(-1) for row in logits.split(1)]) if len(logits) else logits.new_empty(0)
