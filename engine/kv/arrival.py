"""Pages on their way from the host to the device, in groups of layers: main waits for each group just before it needs it."""

from collections import deque
from collections.abc import Iterable, Sequence

from engine.kv.side_stream import Mark

Group = tuple[int, Sequence[Mark]]  # (first layer, marks behind the copies of the group)


class Arrival:
    """`groups`: in the order of layers; none: all is there."""

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._ahead = deque(groups)

    @property
    def is_held(self) -> bool:
        """Whether main waits for all of it."""
        return not self._ahead

    def hold(self, layer: int) -> None:
        """Let what is enqueued on main from now on run after the copies of the layers up to `layer`."""
        while self._ahead and self._ahead[0][0] <= layer:
            self._hold_next()

    def hold_all(self) -> None:
        while self._ahead:
            self._hold_next()

    def _hold_next(self) -> None:
        for mark in self._ahead.popleft()[1]:
            mark.hold_main()
