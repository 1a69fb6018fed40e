"""The model's logprobs, before any edit, temperature or filter: of all rows of a step in one call and one copy to the host."""

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
    """Views of n rows on the host: token_ids and chosen [n], top_values and top_ids [n, k], requested [n, len(requested_ids)].

    Best first. On CUDA valid after the step's event.
    """

    token_ids: IntArray
    chosen: FloatArray
    top_values: FloatArray
    top_ids: IntArray
    requested_ids: tuple[int, ...]
    requested: FloatArray


def packed_logprobs(logits: Tensor, tokens: Tensor, *, top_num: int, token_ids: Tensor) -> Tensor:
    """Return [n, 2 + 2 * min(top_num, V) + r] int32, for `Packed`.

    logits [n, V] float32; tokens [n] int64; token_ids [n, r] int64: whose logprobs are wanted, too.
    """
    norms = log_norms(logits)[:, None]
    top = logits.topk(min(top_num, logits.shape[1]), dim=-1)
    values = torch.cat([logits.gather(1, tokens[:, None]), top.values, logits.gather(1, token_ids)], 1) - norms
    return torch.cat([tokens[:, None].int(), top.indices.int(), values.view(torch.int32)], 1)


class Packed:
    """Packed logprobs on the host: `table` of `packed_logprobs`, `most`: its top_num."""

    def __init__(self, table: Tensor, *, most: int) -> None:
        self._ids: IntArray = table.numpy()  # shares memory: a copy from the GPU may still be under way
        self._values: FloatArray = self._ids.view(np.float32)
        self._most = most

    def rows(self, begin: int, end: int, *, top_num: int, requested_ids: tuple[int, ...]) -> Logprobs:
        """Rows begin.. to end; their `top_num` and `requested_ids` may be fewer than the table's."""
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
    """Return [n]: logsumexp of each row of logits [n, V] float32, the same bits in any batch.

    torch splits a sum by the number of rows, so it takes one row at a time.
    """
    if logits.device.type != "cpu" and find_spec("triton") is not None:
        from engine.kernels.triton_sample import log_norms as by_triton

        return by_triton(logits)
    return torch.cat([row.logsumexp(-1) for row in logits.split(1)]) if len(logits) else logits.new_empty(0)
