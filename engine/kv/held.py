"""What of the model's KV a rank's pool holds, and what ranks hold together. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldKV:
    """Some of the model's `num_units` units (engine/kv/kv_pool.py), with some of its `num_layers` layers that have KV.

    `state_layers`, `num_state_layers`: the same of recurrent layers, counted by themselves.
    """

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
        """Return the name of the part: ranks that hold the same part have the same name."""
        units, layers = self.units, self.layers
        return f"units {units.start}-{units.stop - 1}, layers {layers.start}-{layers.stop - 1}"

    @staticmethod
    def whole(*, num_units: int, num_layers: int) -> "HeldKV":
        return HeldKV(range(num_units), num_units, range(num_layers), num_layers)


@dataclass(frozen=True, slots=True)
class HeldState:
    """Of a recurrent layer's state `channels` of the convolution's `num_channels`, as they lie here, and `heads` of `num_heads`."""

    channels: tuple[range, ...]
    num_channels: int
    heads: range
    num_heads: int

    def __post_init__(self) -> None:
        ends = [end for channels in self.channels for end in (channels.start, channels.stop)]
        assert ends == sorted(ends) and ends[-1] <= self.num_channels, self
        assert 0 <= self.heads.start < self.heads.stop <= self.num_heads, self


class CopiesDiffer(Exception):
    """Ranks that hold the same part hold other bytes of it. Its text names the part."""


def total(ranks: Iterable[Mapping[str, int]]) -> int:
    """Add up the checksums of all ranks, each by the part of the model's memory that it covers. Raises CopiesDiffer."""
    parts: dict[str, int] = {}
    for rank in ranks:
        for part, value in rank.items():
            if parts.setdefault(part, value) != value:
                raise CopiesDiffer(part)
    return combine(parts.values())


def combine(parts: Iterable[int]) -> int:
    """Add up checksums of parts of the model's memory, each once (engine/kv/page_checksum.py); signed, 64 bits."""
    total = sum(parts) & ((1 << 64) - 1)
    return total - (1 << 64) if total >> 63 else total
