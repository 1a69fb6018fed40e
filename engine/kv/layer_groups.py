"""Groups of layers copied together, in all units of a page."""

from collections.abc import Sequence


def equal_groups(num_layers: int, count: int) -> list[int]:
    assert 1 <= count <= num_layers, (count, num_layers)
    return [num_layers * (i + 1) // count for i in range(count)]


def word_cuts(layer_ends: Sequence[int], word_bytes: int) -> list[int]:
    """Layer starts and the end in words; a word across layers is the first's."""
    return [0, *(-(-end // word_bytes) for end in layer_ends)]
