"""Layerwise transfer: layer groups, and the clock of a step's progress."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence

from engine.executor.layer_marks import LayerMarks
from engine.kv.page_copies import equal_groups
from transfer_backends.contract import LayerGroup, Progress

MAX_GROUPS = 8  # more would hide little more, and cost as many operations
MIN_PIECE_BYTES = 32 << 10  # per group in a page: engines pay per piece (docs/reports/benchmarks.md, "KV transfer")


def groups_of(layer_ends: Sequence[int], *, mode: str) -> tuple[LayerGroup, ...]:
    """Groups have about equal bytes.

    () sends pages whole.
    """
    num, page_bytes, least = len(layer_ends), layer_ends[-1], MIN_PIECE_BYTES if mode == "auto" else 1
    if mode == "off" or (mode == "auto" and page_bytes < 2 * least):
        return ()
    count = max(1, min(MAX_GROUPS, num, page_bytes // least))
    return tuple(LayerGroup(end, layer_ends[end - 1]) for end in equal_groups(num, count))


class StepClock:
    """`LayerClock` over the marks of `layers`, those with KV pages."""

    def __init__(self, marks: LayerMarks, layers: Sequence[int]) -> None:
        self._marks = marks
        self._ends = [layer + 1 for layer in layers]

    def watch(self, counts: Collection[int], wake: Callable[[], None]) -> None:
        """`wake` is called in the stream's thread."""
        self._marks.watch([self._ends[count - 1] for count in counts], wake)

    def progress(self) -> Progress:
        step, marked = self._marks.reached()
        return Progress(step, bisect_right(self._ends, marked))

    @property
    def ticking(self) -> bool:
        return self._marks.ahead
