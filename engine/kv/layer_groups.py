"""Cuts the layers of a unit into groups that are copied together, in all units of a page."""

from collections.abc import Sequence


def equal_groups(num_layers: int, count: int) -> list[int]:
    """Return where each of `count` groups of about equal size ends, counted in layers."""
    assert 1 <= count <= num_layers, (count, num_layers)
    return [num_layers * (i + 1) // count for i in range(count)]


def word_cuts(layer_ends: Sequence[int], word_bytes: int) -> list[int]:
    """Return where layers begin, and the end, in words of a unit; `layer_ends` in bytes. A word of two layers is the first one's."""
    return [0, *(-(-end // word_bytes) for end in layer_ends)]
