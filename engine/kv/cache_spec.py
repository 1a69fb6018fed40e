"""KV layout per layer and page size. Never torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.config import FP8

UNIT_ALIGN_BYTES = 64  # a cache line: best for SIMD kernels and transfer engines
CODES_ALIGN_BYTES = 16  # of latents: a GPU's widest load
LAYER, TAIL = "layer", "tail"  # of a drafter
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Cached data of a layer per token: 2 * num_kv_heads * head_dim elements of `dtype`.

    - fp8: stored as codes and exponents (engine/kv/fp8.py); window: visible tokens, 0 is all
    - latent: for MLA, first elements of K that are V; index: last elements of K, for an index
    - drafter: "layer" of the drafter; "tail": one vector per page and unit; "": model layer
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
    def element_bytes(self) -> int:
        return 1 if self.fp8 else ELEMENT_BYTES[self.dtype]

    @property
    def kept_name(self) -> str:
        return FP8 if self.fp8 else self.dtype

    def bytes_per_token(self) -> int:
        return (1 if self.latent else 2) * self.num_kv_heads * self.row_bytes()

    def bytes_in_page(self, page_size: int) -> int:
        return self.row_bytes() if self.drafter == TAIL else self.bytes_per_token() * page_size

    def row_bytes(self) -> int:
        """Bytes of K or V per token and head, or of a tail. Codes of latents are padded."""
        size = self.head_dim * self.element_bytes + self.fp8
        return align(size, CODES_ALIGN_BYTES) if self.fp8 and self.latent else size

    def v_offset(self, page_size: int) -> int:
        """Bytes from K to V in a page."""
        return 0 if self.latent else self.bytes_per_token() * page_size // 2


def page_bytes_of(specs: Sequence[CacheSpec], page_size: int, *, units: int = 1) -> int:
    return units * max(UNIT_ALIGN_BYTES, align(unit_end(unit_parts(specs, units), page_size), UNIT_ALIGN_BYTES))


def unit_parts(specs: Sequence[CacheSpec], units: int) -> list[CacheSpec]:
    heads = [spec.num_kv_heads for spec in specs if spec.drafter != TAIL]
    assert units >= 1 and not any(count % units for count in heads), (units, specs)
    return [spec if spec.drafter == TAIL else replace(spec, num_kv_heads=spec.num_kv_heads // units) for spec in specs]


def layer_offsets(specs: Sequence[CacheSpec], page_size: int) -> list[int]:
    """Byte offsets of layers in a unit."""
    offsets, at = [], 0
    for spec in specs:
        at = align(at, spec.element_bytes)
        offsets.append(at)
        at += spec.bytes_in_page(page_size)
    return offsets


def unit_end(parts: Sequence[CacheSpec], page_size: int) -> int:
    """End of a unit's last layer, without padding."""
    if not parts:  # all layers have windows, and another pool
        return 0
    return layer_offsets(parts, page_size)[-1] + parts[-1].bytes_in_page(page_size)


def align(n: int, to: int) -> int:
    return -(-n // to) * to


# ---- Parts of the model's KV in a rank's pool, and their checksums over ranks. Pure.


@dataclass(frozen=True, slots=True)
class KVShard:
    """Ranges of the model's KV units and layers (engine/kv/kv_pool.py), and of recurrent layers."""

    units: range
    num_units: int
    layers: range
    num_layers: int
    state_layers: range = range(0)
    num_state_layers: int = 0

    def __post_init__(self) -> None:
        for held, total in ((self.units, self.num_units), (self.layers, self.num_layers)):
            assert 0 <= held.start < held.stop <= total and held.step == 1, self

    @property
    def name(self) -> str:
        """Name of the part, equal on replicas."""
        units, layers = self.units, self.layers
        return f"units {units.start}-{units.stop - 1}, layers {layers.start}-{layers.stop - 1}"

    @staticmethod
    def whole(*, num_units: int, num_layers: int) -> "KVShard":
        return KVShard(range(num_units), num_units, range(num_layers), num_layers)


@dataclass(frozen=True, slots=True)
class StateShard:
    channels: tuple[range, ...]
    num_channels: int
    heads: range
    num_heads: int

    def __post_init__(self) -> None:
        ends = [end for channels in self.channels for end in (channels.start, channels.stop)]
        assert ends == sorted(ends) and ends[-1] <= self.num_channels, self
        assert 0 <= self.heads.start < self.heads.stop <= self.num_heads, self


class CopiesDiffer(Exception):
    """Replicas have different bytes; names the part."""


def total(ranks: Iterable[Mapping[str, int]]) -> int:
    """Add the ranks' checksums, each part once. Raises CopiesDiffer."""
    parts: dict[str, int] = {}
    for rank in ranks:
        for part, value in rank.items():
            if parts.setdefault(part, value) != value:
                raise CopiesDiffer(part)
    return combine(parts.values())


def combine(parts: Iterable[int]) -> int:
    """Add checksums of distinct parts; signed, 64 bits."""
    total = sum(parts) & ((1 << 64) - 1)
    return total - (1 << 64) if total >> 63 else total
