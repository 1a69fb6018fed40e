"""KV cache memory and layout: one allocation, page-major.

  base ->  | page 0 (scratch) | page 1 | ... | page num_pages |      page_bytes apart
  page ->  | unit 0 | unit 1 | ... |                 unit_bytes apart, a multiple of 64
  unit ->  | layer 0 K [page_size, heads, head_dim] | layer 0 V | layer 1 K | ... | drafter | pad |
  fp8:     K [page_size, heads * head_dim + heads]: per token codes, then exponents (fp8.py)
  MLA:     K alone
  drafter: its layers, and the page's tail: one vector, equal in each unit

A unit has an equal share of KV heads of all layers. Adjacent pages transfer as one piece; workers
with different TP exchange units (engine/kv/cache_spec.py).
"""

import contextlib
import hashlib
import mmap
from collections.abc import Callable, Sequence
from copy import copy
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import NamedTuple

import torch

from engine.config import DUMMY, EngineConfig
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.kv.cache_spec import LAYER, TAIL, CacheSpec, KVShard, layer_offsets, page_bytes_of, unit_end, unit_parts
from engine.kv.fp8 import dequantized, quantized
from engine.model_files.model_config import ModelConfig
from service.flags import ConfigError

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class LikeLayers(NamedTuple):
    """Equal layers of a unit as one strided view, so that few kernels copy a whole token.

    `rows` of `row_bytes` each, `apart` bytes apart, from byte `begin`.
    """

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


AllocateBytes = Callable[[int, torch.device], torch.Tensor]  # (bytes, device) -> zeroed uint8[bytes]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def kept_as(spec: CacheSpec) -> torch.dtype:
    return torch.uint8 if spec.fp8 else DTYPES[spec.dtype]


def zeroed_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed uint8[size_bytes]; mapped lazily on CPU."""
    if device.type != "cpu":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    # An anonymous map is zero, lazy (torch.zeros would touch every byte) and page-aligned.
    region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # kernels without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)  # random pages of a big pool would miss the TLB on every read
    return torch.frombuffer(region, dtype=torch.uint8)


class Units(NamedTuple):
    count: int
    stride: int


ONE_UNIT = Units(1, 0)


class KVPool:
    """Pages 1..num_pages with `specs` per layer, the drafter's last; page 0 is scratch for padding.

    New memory is zero: no stale NaN enters masked sums.
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
        self.base_ptr = self.buffer.data_ptr()
        self._parts = unit_parts(specs, units)
        self.unit_end = unit_end(self._parts, page_size)
        offsets = layer_offsets(self._parts, page_size)
        self._show(list(zip(self._parts, offsets, strict=True))[: len(self.specs)])
        self._runs = like_layers(self._parts, page_size)
        layout = {"num_pages": 1 + num_pages, "page_size": page_size, "units": units, "page_bytes": self.page_bytes}
        self._token_rows = [token_rows(self.buffer, run, **layout) for run in self._runs]
        self.drafter = self._drafter(specs, offsets) if len(self.specs) < len(specs) else None

    def _show(self, layers: Sequence[tuple[CacheSpec, int]]) -> None:
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
        """Page tails [1 + num_pages, units, size] for a drafter, or None."""
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
    def num_layers(self) -> int:
        return len(self.specs)

    @property
    def num_parts(self) -> int:
        """Layers of a page, counting drafter data as one."""
        return len(self.specs) + (self.drafter is not None)

    def layer_ends(self) -> list[int]:
        """Ends of parts in a unit, with padding."""
        return [*layer_offsets(self._parts, self.page_size)[1 : self.num_parts], self.unit_bytes]

    def bits_of(self, num_tokens: int) -> torch.Tensor:
        """Mask of the first `num_tokens` tokens and the tail: uint8 of a unit, or its period."""
        row_bytes = self._runs[0].row_bytes
        if len(self._runs) == 1 and self.tails is None and self.page_size * row_bytes % max(WORDS) == 0:
            bits = torch.zeros(self.page_size * row_bytes, dtype=torch.uint8, device=self.device)
            bits[: num_tokens * row_bytes] = 255
            return bits
        bits = torch.zeros(self.unit_bytes, dtype=torch.uint8, device=self.device)
        layout = {"num_pages": 1, "page_size": self.page_size, "units": 1, "page_bytes": self.unit_bytes}
        for run in self._runs:
            token_rows(bits, run, **layout)[:, :, :, :num_tokens].bitwise_not_()
        if self.tails is not None:
            bits[layer_offsets(self._parts, self.page_size)[-1] : self.unit_end] = 255
        return bits

    @property
    def held(self) -> KVShard:
        return KVShard.whole(num_units=self.units, num_layers=self.num_parts)

    def k(self, layer: int, unit: int = 0) -> torch.Tensor:
        """View [1 + num_pages, page_size, unit KV heads, head_dim], contiguous in a page."""
        return self._k[layer][unit]

    def v(self, layer: int, unit: int = 0) -> torch.Tensor:
        return self._v[layer][unit]

    def units_of(self, layer: int) -> Units:
        return ONE_UNIT if self.units == 1 else Units(self.units, self.unit_bytes // self._k[layer][0].itemsize)

    def write(self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store token t at (pages[t], offsets[t]), int64[T]; k, v [T, kv_heads, head_dim]."""
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
        """Copy tokens between places, int64[n], in all layers and the drafter's.

        Places may be both read and written.
        """
        for rows in self._token_rows:
            rows[to_pages, :, :, to_offsets] = rows[from_pages, :, :, from_offsets]

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `pages`, [n * page_size, kv_heads, head_dim]."""
        k, v = (self._gathered(layer, caches, pages) for caches in (self._k[layer], self._v[layer]))
        return k, v

    def rounded(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        """K or V as read back after a write."""
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
        page, token, head_dim, _ = codes.stride()
        heads = codes.shape[2]
        return self.buffer.as_strided(codes.shape[:3], (page, token, 1), codes.storage_offset() + heads * head_dim)

    def _views(self, part: CacheSpec, offset_bytes: int) -> list[torch.Tensor]:
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


# ---- Identity of this engine's KV, without which no process finds its pages.

LAYOUT_VERSION = 2
SAMPLE_BYTES, NUM_SAMPLES = 16 << 10, 64  # per file of a checkpoint


def kv_identity(
    pool: KVPool,
    model: ModelConfig,
    *,
    dtype: str,
    weights: str,
    held: KVShard,
    sums: str,
) -> KVIdentity:
    """Name the part of a model's KV that is `held` by `pool`.

    `weights`: their version and files; `sums`: their order, which changes last bits.
    """
    layers = "+".join(
        f"{len(list(group))}x{kv_heads}x{head_dim}:{kind}"
        for (kv_heads, head_dim, kind), group in groupby((s.num_kv_heads, s.head_dim, s.kept_name) for s in pool.specs)
    )
    return KVIdentity(
        layout=hashed_if_long(
            f"v{LAYOUT_VERSION}/{pool.device.type}/{layers}"
            f"/units {held.units.start}-{held.units.stop} of {held.num_units}"
            f"/layers {held.layers.start}-{held.layers.stop} of {held.num_layers}"
            f"/sums of {sums}"
        ),
        dtype=dtype,
        page_size=pool.page_size,
        page_bytes=pool.page_bytes,
        model=model.signature(),
        weights=weights,
    )


def hashed_if_long(text: str) -> str:
    return text if len(text) <= 128 else hashlib.sha256(text.encode()).hexdigest()


def fingerprint(model_path: str, *, dummy: bool = False) -> str:
    """Hash names, sizes, times and content samples of a checkpoint. Raises ConfigError.

    Full reads would take minutes, and images may give all files one time.
    """
    return _hash(model_path, times=True, dummy=dummy)[:32]


def fingerprint_of(config: EngineConfig, *, times: bool = True) -> str:
    """Fingerprints of model and drafter, both in pages. Raises ConfigError."""
    paths = [path for path in (config.model_path, config.speculative_draft_model_path) if path is not None]
    return "+".join(_hash(path, times=times, dummy=config.load_format == DUMMY)[:32] for path in paths)


def weights_number(model_path: str, *, dummy: bool = False) -> int:
    """Hash to 64 bits without times, equal for copies elsewhere. Raises ConfigError."""
    return int(_hash(model_path, times=False, dummy=dummy)[:16], 16)


class WeightsNumber:
    """Number of the weights in use, 64 bits, computed on demand. KV crosses between equal ones."""

    def __init__(self, compute: Callable[[], int]) -> None:
        self._compute = compute
        self._number = 0

    def __call__(self) -> int:
        self._number = self._number or self._compute()
        return self._number

    def take(self, number: int) -> None:
        self._number = number


def _hash(model_path: str, *, times: bool, dummy: bool) -> str:
    digest = hashlib.sha256(DUMMY.encode() if dummy else b"")
    try:
        model = Path(model_path)
        for file in [model] if model.is_file() else sorted([*model.glob("*.safetensors"), model / "config.json"]):
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns if times else ''}\0".encode())
            with file.open("rb") as opened:
                for at in range(0, status.st_size, max(SAMPLE_BYTES, status.st_size // NUM_SAMPLES)):
                    opened.seek(at)
                    digest.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{model_path}: {error}") from error
    return digest.hexdigest()
