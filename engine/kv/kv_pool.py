"""The bytes of the KV cache: one allocation, page-major. Owns memory and layout.

    base ->  | page 0 (scratch) | page 1 | ... | page num_pages |          page_bytes apart, a multiple of 64
    page ->  | layer 0 K [page_size, kv_heads, head_dim] | layer 0 V | layer 1 K | layer 1 V | ... | pad |

A page of all layers is one run, so a transfer of adjacent pages is one piece.
"""

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

PAGE_ALIGN_BYTES = 64  # a cache line: what the SIMD kernels and the transfer engines like best
AllocateBytes = Callable[[int, torch.device], torch.Tensor]  # (bytes, device) -> [bytes] uint8, zero
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a layer keeps: K and V of every token. Per token: 2 * num_kv_heads * head_dim elements of `dtype` ("bfloat16" | "float32")."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def itemsize_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize_bytes


def zeroed_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate [size_bytes] uint8, zero; mapped lazily on CPU."""
    if device.type != "cpu":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    # An anonymous map is zero and lazy (torch.zeros would touch every byte) and aligned to a memory page.
    region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # kernels without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)  # random pages of a big pool miss the TLB on every read otherwise
    return torch.frombuffer(region, dtype=torch.uint8)


class KVPool:
    """`specs[i]`: of layer i. Page 0 is scratch for padding; real pages are 1..num_pages.

    New memory is zero, so a stale NaN never reaches a masked sum. On CPU it is mapped lazily.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        num_pages: int,
        page_size: int,
        device: str | torch.device,
        allocate: AllocateBytes = zeroed_bytes,
    ) -> None:
        assert num_pages >= 1 and page_size >= 1, (num_pages, page_size)
        self.specs = tuple(specs)
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self.page_bytes = self.page_bytes_of(specs, page_size)
        self.buffer = allocate((1 + num_pages) * self.page_bytes, self.device)
        offsets = _layer_offsets(self.specs, page_size)
        self._k = [self._view(spec, at) for spec, at in zip(self.specs, offsets, strict=True)]
        self._v = [
            self._view(spec, at + _half_bytes(spec, page_size)) for spec, at in zip(self.specs, offsets, strict=True)
        ]

    @staticmethod
    def page_bytes_of(specs: Sequence[CacheSpec], page_size: int) -> int:
        """Return the bytes of one page of all layers."""
        end = _layer_offsets(specs, page_size)[-1] + 2 * _half_bytes(specs[-1], page_size)
        return _align(end, PAGE_ALIGN_BYTES)

    @property
    def base_ptr(self) -> int:
        """Return the address of page 0; page p is at base_ptr + p * page_bytes."""
        return self.buffer.data_ptr()

    @property
    def num_layers(self) -> int:
        return len(self.specs)

    def layer_ends(self) -> list[int]:
        """Return the byte of a page where each layer ends, padding included."""
        return [*_layer_offsets(self.specs, self.page_size)[1:], self.page_bytes]

    def k(self, layer: int) -> torch.Tensor:
        """Return a [1 + num_pages, page_size, kv_heads, head_dim] view, contiguous within a page."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v[layer]

    def write(self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store token t at (pages[t], offsets[t]). pages, offsets: [T] int64; k, v: [T, kv_heads, head_dim]."""
        cache = self._k[layer]
        cache.index_put_((pages, offsets), k.to(cache.dtype))
        self._v[layer].index_put_((pages, offsets), v.to(cache.dtype))

    def _view(self, spec: CacheSpec, offset_bytes: int) -> torch.Tensor:
        dtype = DTYPES[spec.dtype]
        row = spec.num_kv_heads * spec.head_dim
        return self.buffer.view(dtype).as_strided(
            (1 + self.num_pages, self.page_size, spec.num_kv_heads, spec.head_dim),
            (self.page_bytes // dtype.itemsize, row, spec.head_dim, 1),
            offset_bytes // dtype.itemsize,
        )


def _half_bytes(spec: CacheSpec, page_size: int) -> int:
    return spec.bytes_per_token() * page_size // 2


def _layer_offsets(specs: Sequence[CacheSpec], page_size: int) -> list[int]:
    """Return the byte offset of each layer inside a page, aligned to its element."""
    offsets, at = [], 0
    for spec in specs:
        at = _align(at, spec.itemsize_bytes)
        offsets.append(at)
        at += 2 * _half_bytes(spec, page_size)
    return offsets


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
