"""The bytes of the KV cache: one allocation, page-major. Owns memory and layout.

    base ->  | page 0 (scratch) | page 1 | ... | page num_pages |          page_bytes apart
    page ->  | unit 0 | unit 1 | ... |                                     unit_bytes apart, a multiple of 64
    unit ->  | layer 0 K [page_size, heads, head_dim] | layer 0 V | layer 1 K | layer 1 V | ... | drafter | pad |   latents: K alone
    with fp8:     K [page_size, heads * head_dim + heads]: of each token the codes of its heads, then their exponents (fp8.py)
    drafter: its layers, as those of the model, and the page's tail: one vector, in each unit the same

A unit holds an equal share of the kv heads, in their order, of all layers. A page of all layers is one run, so a transfer of
adjacent pages is one piece; a unit is one run, so workers whose ranks hold other heads exchange units (engine/kv/held.py).
What a drafter keeps (engine/models/draft_model.py) counts as one more layer of a page: prefixes, copies and transfers have it without
knowing it.
"""

import contextlib
import mmap
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine.config import FP8
from engine.kv.fp8 import dequantized, quantized
from engine.kv.held import HeldKV

UNIT_ALIGN_BYTES = 64  # a cache line: what the SIMD kernels and the transfer engines like best
AllocateBytes = Callable[[int, torch.device], torch.Tensor]  # (bytes, device) -> [bytes] uint8, zero
LAYER, TAIL = "layer", "tail"  # of a drafter
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a layer keeps: K and V of every token. Per token: 2 * num_kv_heads * head_dim elements of `dtype` ("bfloat16" | "float32").

    `fp8`: kept as codes and exponents (engine/kv/fp8.py), and read as `dtype`.
    `window`: the last tokens that a query sees, its own included; 0: all. `latent`: of latent attention, the first elements of
    K that are V, too, which is not kept; 0: V is kept. `index`: the last elements of K, which an index reads alone.
    `drafter`: "layer": of the drafter; "tail": one vector of each page, in each unit, for it; "": a layer of the model.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int = 0
    latent: int = 0
    index: int = 0
    fp8: bool = False
    drafter: str = ""

    @property
    def kept_as(self) -> torch.dtype:
        """Type of an element in memory."""
        return torch.uint8 if self.fp8 else DTYPES[self.dtype]

    @property
    def kept_name(self) -> str:
        """As --kv-cache-dtype names it, resolved."""
        return FP8 if self.fp8 else self.dtype

    def bytes_per_token(self) -> int:
        return (1 if self.latent else 2) * self.num_kv_heads * self.row_bytes()

    def bytes_in_page(self, page_size: int) -> int:
        return self.row_bytes() if self.drafter == TAIL else self.bytes_per_token() * page_size

    def row_bytes(self) -> int:
        """Of K or V of a token and head, or of a tail."""
        return self.head_dim * self.kept_as.itemsize + self.fp8


def zeroed_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate [size_bytes] uint8, zero; mapped lazily on CPU."""
    if device.type != "cpu":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    # An anonymous map is zero and lazy (torch.zeros would touch every byte) and aligned to a memory page.
    region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # kernels without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)  # random pages of a big pool miss the TLB on every read otherwise
    return torch.frombuffer(region, dtype=torch.uint8)


class Units(NamedTuple):
    """Of a layer, for kernels that get the K and V of unit 0. `stride`: elements from unit to unit; of one alone it is not read."""

    count: int
    stride: int


ONE_UNIT = Units(1, 0)


class KVPool:
    """`specs[i]`: of layer i, the drafter's last. `units`: of a page, divides the kv heads. Page 0 is scratch for padding; real pages are
    1..num_pages. `drafter`: the same pages, as the drafter's layers see them; None: there is none.

    New memory is zero, so a stale NaN never reaches a masked sum. On CPU it is mapped lazily.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        num_pages: int,
        page_size: int,
        device: str | torch.device,
        units: int = 1,
        allocate: AllocateBytes = zeroed_bytes,
    ) -> None:
        assert num_pages >= 1 and page_size >= 1, (num_pages, page_size)
        self.specs = tuple(spec for spec in specs if not spec.drafter)
        self.num_pages = num_pages
        self.page_size = page_size
        self.units = units
        self.device = torch.device(device)
        self.page_bytes = self.page_bytes_of(specs, page_size, units=units)
        self.unit_bytes = self.page_bytes // units
        self.buffer = allocate((1 + num_pages) * self.page_bytes, self.device)
        self._parts = _parts(specs, units)
        offsets = _layer_offsets(self._parts, page_size)
        self._show(list(zip(self._parts, offsets, strict=True))[: len(self.specs)])
        self.drafter = self._drafter(specs, offsets) if len(self.specs) < len(specs) else None

    def _show(self, layers: Sequence[tuple[CacheSpec, int]]) -> None:
        """`layers`: parts in a unit, and where they begin there."""
        self._k = [self._views(part, at) for part, at in layers]
        self._v = [self._views(part, at + _v_offset(part, self.page_size)) for part, at in layers]

    def _drafter(self, specs: Sequence[CacheSpec], offsets: Sequence[int]) -> "KVPool":
        own = copy(self)
        own.specs = tuple(spec for spec in specs if spec.drafter == LAYER)
        first = len(self.specs)
        own._show(list(zip(self._parts, offsets, strict=True))[first : first + len(own.specs)])
        own.drafter = None
        return own

    @property
    def tails(self) -> torch.Tensor | None:
        """[1 + num_pages, units, size]: the tail of each page, which a drafter reads and writes; None: pages have none."""
        if self.drafter is None or self._parts[-1].drafter != TAIL:
            return None
        part, at = self._parts[-1], _layer_offsets(self._parts, self.page_size)[-1]
        dtype = part.kept_as
        return self.buffer.view(dtype).as_strided(
            (1 + self.num_pages, self.units, part.head_dim),
            (self.page_bytes // dtype.itemsize, self.unit_bytes // dtype.itemsize, 1),
            at // dtype.itemsize,
        )

    @staticmethod
    def page_bytes_of(specs: Sequence[CacheSpec], page_size: int, *, units: int = 1) -> int:
        """Return the bytes of one page of all layers."""
        return units * max(UNIT_ALIGN_BYTES, _align(_end(_parts(specs, units), page_size), UNIT_ALIGN_BYTES))

    @property
    def base_ptr(self) -> int:
        """Return the address of page 0; page p is at base_ptr + p * page_bytes."""
        return self.buffer.data_ptr()

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.specs)

    @property
    def num_parts(self) -> int:
        """Layers of a page, where what the drafter keeps is one more."""
        return len(self.specs) + (self.drafter is not None)

    def layer_ends(self) -> list[int]:
        """Return the byte of a unit where each of its parts ends, padding included."""
        return [*_layer_offsets(self._parts, self.page_size)[1 : self.num_parts], self.unit_bytes]

    @property
    def unit_end(self) -> int:
        """Return the byte of a unit where its last layer ends, without padding."""
        return _end(self._parts, self.page_size)

    @property
    def held(self) -> HeldKV:
        """Return what the pool holds if it is the model's only one."""
        return HeldKV.whole(num_units=self.units, num_layers=self.num_parts)

    def k(self, layer: int, unit: int = 0) -> torch.Tensor:
        """Return a [1 + num_pages, page_size, kv heads of a unit, head_dim] view, contiguous within a page; with fp8, of codes.

        That of unit u lies u * unit_bytes behind the one of unit 0.
        """
        return self._k[layer][unit]

    def v(self, layer: int, unit: int = 0) -> torch.Tensor:
        return self._v[layer][unit]

    def units_of(self, layer: int) -> Units:
        return ONE_UNIT if self.units == 1 else Units(self.units, self.unit_bytes // self._k[layer][0].itemsize)

    def write(self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store token t at (pages[t], offsets[t]). pages, offsets: [T] int64; k, v: [T, kv_heads, head_dim]."""
        kept = ((self._k[layer], k), (self._v[layer], v))
        for caches, new in kept[:1] if self.specs[layer].latent else kept:
            parts = (new,) if self.units == 1 else new.chunk(self.units, 1)
            for cache, part in zip(caches, parts, strict=True):
                if self.specs[layer].fp8:
                    part, exponents = quantized(part)
                    self._exponents(cache).index_put_((pages, offsets), exponents)
                cache.index_put_((pages, offsets), part.to(cache.dtype))

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all tokens of `pages` [n], in their order: [n * page_size, kv_heads, head_dim] of the spec's dtype."""
        k, v = (self._gathered(layer, caches, pages) for caches in (self._k[layer], self._v[layer]))
        return k, v

    def rounded(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        """Return what `read` gives of K or V `new` [T, kv_heads, head_dim] once it is written."""
        spec = self.specs[layer]
        return dequantized(*quantized(new), DTYPES[spec.dtype]) if spec.fp8 else new.to(DTYPES[spec.dtype])

    def _gathered(self, layer: int, caches: Sequence[torch.Tensor], pages: torch.Tensor) -> torch.Tensor:
        parts = [cache.index_select(0, pages).flatten(0, 1) for cache in caches]
        if self.specs[layer].fp8:
            exponents = [self._exponents(cache).index_select(0, pages).flatten(0, 1) for cache in caches]
            dtype = DTYPES[self.specs[layer].dtype]
            parts = [dequantized(part, own, dtype) for part, own in zip(parts, exponents, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _exponents(self, codes: torch.Tensor) -> torch.Tensor:
        """[1 + num_pages, page_size, kv heads of a unit], of a view as `k` gives it."""
        page, token, head_dim, _ = codes.stride()
        heads = codes.shape[2]
        return self.buffer.as_strided(codes.shape[:3], (page, token, 1), codes.storage_offset() + heads * head_dim)

    def _views(self, part: CacheSpec, offset_bytes: int) -> list[torch.Tensor]:
        """Of each unit, where `part` lies `offset_bytes` behind the unit's begin."""
        return [self._view(part, unit * self.unit_bytes + offset_bytes) for unit in range(self.units)]

    def _view(self, part: CacheSpec, offset_bytes: int) -> torch.Tensor:
        dtype = part.kept_as
        return self.buffer.view(dtype).as_strided(
            (1 + self.num_pages, self.page_size, part.num_kv_heads, part.head_dim),
            (
                self.page_bytes // dtype.itemsize,
                part.num_kv_heads * part.row_bytes() // dtype.itemsize,
                part.head_dim,
                1,
            ),
            offset_bytes // dtype.itemsize,
        )


def _parts(specs: Sequence[CacheSpec], units: int) -> list[CacheSpec]:
    """Of each layer, what a unit holds."""
    heads = [spec.num_kv_heads for spec in specs if spec.drafter != TAIL]
    assert units >= 1 and not any(count % units for count in heads), (units, specs)
    return [spec if spec.drafter == TAIL else replace(spec, num_kv_heads=spec.num_kv_heads // units) for spec in specs]


def _v_offset(spec: CacheSpec, page_size: int) -> int:
    """Bytes from K to V."""
    return 0 if spec.latent else spec.bytes_per_token() * page_size // 2


def _layer_offsets(specs: Sequence[CacheSpec], page_size: int) -> list[int]:
    """Return the byte offset of each layer inside a unit, aligned to its element. `specs`: of a unit."""
    offsets, at = [], 0
    for spec in specs:
        at = _align(at, spec.kept_as.itemsize)
        offsets.append(at)
        at += spec.bytes_in_page(page_size)
    return offsets


def _end(parts: Sequence[CacheSpec], page_size: int) -> int:
    if not parts:  # all layers have a window, and another pool
        return 0
    return _layer_offsets(parts, page_size)[-1] + parts[-1].bytes_in_page(page_size)


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
