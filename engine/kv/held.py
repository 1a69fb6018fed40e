"""Parts of the model's KV in a rank's pool, and their checksums over ranks. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldKV:
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
    def whole(*, num_units: int, num_layers: int) -> "HeldKV":
        return HeldKV(range(num_units), num_units, range(num_layers), num_layers)


@dataclass(frozen=True, slots=True)
class HeldState:
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
