"""KV layout per layer and page size. Never torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.config import FP8

UNIT_ALIGN_BYTES = 64  # a cache line: best for SIMD kernels and transfer engines
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
        """Bytes of K or V per token and head, or of a tail."""
        return self.head_dim * self.element_bytes + self.fp8

    def v_offset(self, page_size: int) -> int:
        """Bytes from K to V in a page."""
        return 0 if self.latent else self.bytes_per_token() * page_size // 2


def page_bytes_of(specs: Sequence[CacheSpec], page_size: int, *, units: int = 1) -> int:
    return units * max(UNIT_ALIGN_BYTES, _align(unit_end(unit_parts(specs, units), page_size), UNIT_ALIGN_BYTES))


def unit_parts(specs: Sequence[CacheSpec], units: int) -> list[CacheSpec]:
    heads = [spec.num_kv_heads for spec in specs if spec.drafter != TAIL]
    assert units >= 1 and not any(count % units for count in heads), (units, specs)
    return [spec if spec.drafter == TAIL else replace(spec, num_kv_heads=spec.num_kv_heads // units) for spec in specs]


def layer_offsets(specs: Sequence[CacheSpec], page_size: int) -> list[int]:
    """Byte offsets of layers in a unit."""
    offsets, at = [], 0
    for spec in specs:
        at = _align(at, spec.element_bytes)
        offsets.append(at)
        at += spec.bytes_in_page(page_size)
    return offsets


def unit_end(parts: Sequence[CacheSpec], page_size: int) -> int:
    """End of a unit's last layer, without padding."""
    if not parts:  # all layers have windows, and another pool
        return 0
    return layer_offsets(parts, page_size)[-1] + parts[-1].bytes_in_page(page_size)


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
