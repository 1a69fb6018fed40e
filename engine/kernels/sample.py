"""Token sampling on CPU (sample.c), one pass per row without a sort."""

import ctypes
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cache

import torch
from torch import Tensor

from engine.kernels import tape
from engine.kernels.build import CSource, fields

MOST_TOKENS = 2**22  # vocabulary size whose sum of masses fits in an int64


class _Args(ctypes.Structure):
    _fields_ = fields(
        ("logits", "rows", "best", "greedy", "keys", "temperature", "top_p", "log_min_p", "top_k", "tokens"),
        ("count", "vocab", "stride"),
    )


# noise has the same bits everywhere: no fused multiply-add
SOURCE = CSource("sample", 2, {"sample": _Args}, flags=("-ffp-contract=off",))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Parameters of sampled `rows` int64[n] of the logits.

    `greedy` (first best token), `keys`, `top_k` (vocabulary size: off) are int64, others float32.
    """

    rows: Tensor
    best: Tensor
    greedy: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    def part(self, at: Tensor) -> "SampledRows":
        return SampledRows(*(getattr(self, field.name)[at] for field in dataclass_fields(self)))


class SampleKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        library.tandem_noise.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._library = library

    def sample(self, logits: Tensor, which: SampledRows) -> Tensor:
        """Return int64[n] tokens from float32 logits [any, V]. Raises MemoryError."""
        n, vocab_size = len(which.rows), logits.shape[1]
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and vocab_size <= MOST_TOKENS, logits.shape
        tokens = torch.empty(n, dtype=torch.int64)
        args = _Args(
            logits=logits.data_ptr(),
            rows=_address(which.rows, n, torch.int64),
            best=_address(which.best, n, torch.float32),
            greedy=_address(which.greedy, n, torch.int64),
            keys=_address(which.keys, n, torch.int64),
            temperature=_address(which.temperature, n, torch.float32),
            top_p=_address(which.top_p, n, torch.float32),
            log_min_p=_address(which.log_min_p, n, torch.float32),
            top_k=_address(which.top_k, n, torch.int64),
            tokens=tokens.data_ptr(),
            count=n,
            vocab=vocab_size,
            stride=logits.stride(0),
        )
        if tape.call_once(self._library.tandem_sample, args):
            raise MemoryError("sample: no memory for the keys of top_k")
        return tokens

    def noise(self, bits: Tensor) -> Tensor:
        """gumbel.noise_of for int64 bits, a multiple of 16."""
        assert len(bits) % 16 == 0, bits.shape
        words, noise = bits.to(torch.uint32), torch.empty(len(bits))
        self._library.tandem_noise(words.data_ptr(), noise.data_ptr(), len(bits))
        return noise


def _address(x: Tensor, n: int, dtype: torch.dtype) -> int:
    assert x.shape == (n,) and x.dtype == dtype and x.is_contiguous(), (x.shape, x.dtype)
    return x.data_ptr()


@cache
def sample_kernel() -> SampleKernel | None:
    return SOURCE.open(SampleKernel)
