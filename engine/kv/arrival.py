"""Pages being loaded from the host by layer group: the main stream waits for each before use."""

from collections import deque
from collections.abc import Iterable, Sequence

from engine.kv.side_stream import Mark

Group = tuple[int, Sequence[Mark]]  # (first layer, marks after the copies of the group)


class Arrival:
    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._ahead = deque(groups)

    @property
    def is_held(self) -> bool:
        return not self._ahead

    def hold(self, layer: int) -> None:
        """Order later main stream work after the copies up to `layer`."""
        while self._ahead and self._ahead[0][0] <= layer:
            self._hold_next()

    def hold_all(self) -> None:
        while self._ahead:
            self._hold_next()

    def _hold_next(self) -> None:
        for mark in self._ahead.popleft()[1]:
            mark.hold_main()
