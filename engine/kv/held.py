"""What of the model's KV a rank's pool holds, and what ranks hold together. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldKV:
    """Some of the model's `num_units` units (engine/kv/kv_pool.py), with some of its `num_layers` layers."""

    units: range
    num_units: int
    layers: range
    num_layers: int

    def __post_init__(self) -> None:
        for held, total in ((self.units, self.num_units), (self.layers, self.num_layers)):
            assert 0 <= held.start < held.stop <= total and held.step == 1, self

    @staticmethod
    def whole(*, num_units: int, num_layers: int) -> "HeldKV":
        return HeldKV(range(num_units), num_units, range(num_layers), num_layers)


def copies_of(held: Mapping[int, HeldKV]) -> list[list[int]]:
    """Ranks that hold the same, for each part; of all parts, everything that `held` names."""
    ranks: dict[HeldKV, list[int]] = {}
    for rank, part in held.items():
        ranks.setdefault(part, []).append(rank)
    return list(ranks.values())


def combine(parts: Iterable[int]) -> int:
    """Add up the checksums of ranks that hold each unit and layer once (engine/kv/page_checksum.py); signed, 64 bits."""
    total = sum(parts) & ((1 << 64) - 1)
    return total - (1 << 64) if total >> 63 else total
