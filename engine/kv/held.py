"""What of the model's KV a rank's pool holds. Pure."""

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
