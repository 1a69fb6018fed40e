"""What a layer keeps of each token, and the bytes of a page of all layers: the layout that KVPool lays over its memory. Never torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.config import FP8

UNIT_ALIGN_BYTES = 64  # a cache line: what the SIMD kernels and the transfer engines like best
LAYER, TAIL = "layer", "tail"  # of a drafter
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The KV that a layer keeps of every token. Per token: 2 * num_kv_heads * head_dim elements of `dtype` ("bfloat16" | "float32").

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
    def element_bytes(self) -> int:
        """Return the bytes of an element in memory."""
        return 1 if self.fp8 else ELEMENT_BYTES[self.dtype]

    @property
    def kept_name(self) -> str:
        """Return the resolved name, as of --kv-cache-dtype."""
        return FP8 if self.fp8 else self.dtype

    def bytes_per_token(self) -> int:
        return (1 if self.latent else 2) * self.num_kv_heads * self.row_bytes()

    def bytes_in_page(self, page_size: int) -> int:
        return self.row_bytes() if self.drafter == TAIL else self.bytes_per_token() * page_size

    def row_bytes(self) -> int:
        """Return the bytes of K or V of a token and head, or of a tail."""
        return self.head_dim * self.element_bytes + self.fp8

    def v_offset(self, page_size: int) -> int:
        """Bytes from K to V in a page."""
        return 0 if self.latent else self.bytes_per_token() * page_size // 2


def page_bytes_of(specs: Sequence[CacheSpec], page_size: int, *, units: int = 1) -> int:
    """Return the bytes of one page of all layers."""
    return units * max(UNIT_ALIGN_BYTES, _align(unit_end(unit_parts(specs, units), page_size), UNIT_ALIGN_BYTES))


def unit_parts(specs: Sequence[CacheSpec], units: int) -> list[CacheSpec]:
    """Return the part of each layer that a unit holds."""
    heads = [spec.num_kv_heads for spec in specs if spec.drafter != TAIL]
    assert units >= 1 and not any(count % units for count in heads), (units, specs)
    return [spec if spec.drafter == TAIL else replace(spec, num_kv_heads=spec.num_kv_heads // units) for spec in specs]


def layer_offsets(specs: Sequence[CacheSpec], page_size: int) -> list[int]:
    """Return the byte offset of each layer inside a unit, aligned to its element. `specs`: of a unit."""
    offsets, at = [], 0
    for spec in specs:
        at = _align(at, spec.element_bytes)
        offsets.append(at)
        at += spec.bytes_in_page(page_size)
    return offsets


def unit_end(parts: Sequence[CacheSpec], page_size: int) -> int:
    """Return the byte of a unit where its last layer ends, without padding."""
    if not parts:  # all layers have a window, and another pool
        return 0
    return layer_offsets(parts, page_size)[-1] + parts[-1].bytes_in_page(page_size)


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
