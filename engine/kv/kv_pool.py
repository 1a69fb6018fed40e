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
from typing import NamedTuple

import torch

from engine.kv.cache_spec import LAYER, TAIL, CacheSpec, layer_offsets, page_bytes_of, unit_end, unit_parts
from engine.kv.fp8 import dequantized, quantized
from engine.kv.held import HeldKV
from engine.kv.token_rows import LikeLayers, like_layers, token_rows

AllocateBytes = Callable[[int, torch.device], torch.Tensor]  # (bytes, device) -> [bytes] uint8, zero
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def kept_as(spec: CacheSpec) -> torch.dtype:
    """Return the type of an element in memory."""
    return torch.uint8 if spec.fp8 else DTYPES[spec.dtype]


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
    """The units of a layer, for kernels that get the K and V of unit 0. `stride`: elements from unit to unit; of one alone it is not read."""

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
        self.page_bytes = page_bytes_of(specs, page_size, units=units)
        self.unit_bytes = self.page_bytes // units
        self.buffer = allocate((1 + num_pages) * self.page_bytes, self.device)
        self._parts = unit_parts(specs, units)
        offsets = layer_offsets(self._parts, page_size)
        self._show(list(zip(self._parts, offsets, strict=True))[: len(self.specs)])
        self._token_rows = [self._rows_of(run) for run in like_layers(self._parts, page_size)]
        self.drafter = self._drafter(specs, offsets) if len(self.specs) < len(specs) else None

    def _show(self, layers: Sequence[tuple[CacheSpec, int]]) -> None:
        """`layers`: parts in a unit, and where they begin there."""
        self._k = [self._views(part, at) for part, at in layers]
        self._v = [self._views(part, at + part.v_offset(self.page_size)) for part, at in layers]

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
        part, at = self._parts[-1], layer_offsets(self._parts, self.page_size)[-1]
        dtype = kept_as(part)
        return self.buffer.view(dtype).as_strided(
            (1 + self.num_pages, self.units, part.head_dim),
            (self.page_bytes // dtype.itemsize, self.unit_bytes // dtype.itemsize, 1),
            at // dtype.itemsize,
        )

    @property
    def base_ptr(self) -> int:
        """Return the address of page 0; page p is at base_ptr + p * page_bytes."""
        return self.buffer.data_ptr()

    @property
    def num_layers(self) -> int:
        """Count the layers of the model."""
        return len(self.specs)

    @property
    def num_parts(self) -> int:
        """Layers of a page, where what the drafter keeps is one more."""
        return len(self.specs) + (self.drafter is not None)

    def layer_ends(self) -> list[int]:
        """Return the byte of a unit where each of its parts ends, padding included."""
        return [*layer_offsets(self._parts, self.page_size)[1 : self.num_parts], self.unit_bytes]

    @property
    def unit_end(self) -> int:
        """Return the byte of a unit where its last layer ends, without padding."""
        return unit_end(self._parts, self.page_size)

    def bits_of(self, num_tokens: int) -> torch.Tensor:
        """Return [bytes of a unit] uint8 on the pool's device: all bits of a page's first `num_tokens` tokens and of its tail, else 0."""
        bits = torch.zeros(self.unit_bytes, dtype=torch.uint8, device=self.device)
        layout = {"num_pages": 1, "page_size": self.page_size, "units": 1, "page_bytes": self.unit_bytes}
        for run in like_layers(self._parts, self.page_size):
            token_rows(bits, run, **layout)[:, :, :, :num_tokens].bitwise_not_()
        if self.tails is not None:
            bits[layer_offsets(self._parts, self.page_size)[-1] : self.unit_end] = 255
        return bits

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

    def move(
        self,
        from_pages: torch.Tensor,
        from_offsets: torch.Tensor,
        to_pages: torch.Tensor,
        to_offsets: torch.Tensor,
    ) -> None:
        """Copy all that is kept of tokens, in all layers, the drafter's too: token t from (from_pages[t], from_offsets[t]) to
        (to_pages[t], to_offsets[t]). All [n] int64, on the pool's device; a place may be read and written. Tails stay.
        """
        for rows in self._token_rows:
            rows[to_pages, :, :, to_offsets] = rows[from_pages, :, :, from_offsets]

    def _rows_of(self, run: LikeLayers) -> torch.Tensor:
        return token_rows(
            self.buffer,
            run,
            num_pages=1 + self.num_pages,
            page_size=self.page_size,
            units=self.units,
            page_bytes=self.page_bytes,
        )

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
        """Return the view of `part` in each unit, `offset_bytes` behind the unit's begin."""
        return [self._view(part, unit * self.unit_bytes + offset_bytes) for unit in range(self.units)]

    def _view(self, part: CacheSpec, offset_bytes: int) -> torch.Tensor:
        dtype = kept_as(part)
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
