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
