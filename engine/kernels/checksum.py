"""Sums of mixed words (engine/kv/page_checksum.py) by checksum.c."""

import ctypes

import torch
from torch import Tensor

from engine.kernels.build import CSource, fields


class _Sums(ctypes.Structure):
    _fields_ = fields(("words", "starts", "keys", "bits", "sums"), ("rows", "count", "step", "word_bytes", "period"))


CHECKSUM = CSource("checksum", {"word_sums": _Sums})


class WordSums:
    """`page_checksum.word_sums` on one core, without the interpreter's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.tandem_word_sums

    def __call__(
        self, words: Tensor, starts: Tensor, keys: Tensor, count: int, step: int, bits: Tensor | None = None
    ) -> Tensor:
        dense = [x for x in (starts, keys, bits) if x is not None]
        assert all(x.dtype == torch.int64 and x.is_contiguous() for x in dense) and len(starts) == len(keys), dense
        assert words.is_contiguous() and (bits is None or words.dtype == torch.int64), (words.shape, words.dtype)
        sums = torch.empty_like(starts)
        at = [None if x is None else x.data_ptr() for x in (words, starts, keys, bits, sums)]
        self._call(_Sums(*at, len(starts), count, step, words.itemsize, count if bits is None else len(bits)))
        return sums


checksum_kernel = CHECKSUM.once(WordSums)
