"""Layerwise progress of KV: waits before layers, and marks after them, which never wait."""

from collections import deque
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from engine.kv.page_copies import Arrival
from engine.layers.rope import Unturned
from engine.models.layer import Attend

Mark = tuple[int, int]  # (step, layers): the first `layers` are written, and all earlier steps


class LayerMarks:
    """`more_follows`: a drafter writes one more layer (`all_written`)."""

    def __init__(self, device: torch.device, *, more_follows: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._more_follows = more_follows
        self.watched = False
        self._ends: frozenset[int] = frozenset()
        self._wake: Callable[[], None] = lambda: None
        self._reached: Mark = (-1, 0)
        self._ahead: deque[tuple[Mark, torch.cuda.Event]] = deque()  # enqueued marks, not reached by the device

    def watch(self, ends: Collection[int], wake: Callable[[], None]) -> None:
        """Mark after each of `ends` layers, and call `wake` in the stream's thread."""
        self._ends, self._wake = frozenset(ends), wake
        self.watched = bool(ends)

    def attend(self, step: int, attend: Attend) -> Attend:
        """Wrap `attend` with marks, once per step of watched layers."""
        self._mark((step, 0))

        def marked(layer: int, new: Unturned) -> Tensor:
            out = attend(layer, new)
            if layer + 1 in self._ends:
                self._mark((step, layer + 1))
            return out

        return marked

    def whole(self, step: int, forward: Callable[[], Tensor]) -> Tensor:
        if not self._ends:
            return forward()
        self._mark((step, 0))
        out = forward()
        if not self._more_follows:
            self.all_written(step)
        return out

    def all_written(self, step: int) -> None:
        if self._ends:
            self._mark((step, max(self._ends)))

    def _mark(self, mark: Mark) -> None:
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._ahead.append((mark, event))
        else:
            self._reached = mark
        self._wake()

    def reached(self) -> Mark:
        """Last reached mark; single-threaded."""
        while self._ahead and self._ahead[0][1].query():
            self._reached = self._ahead.popleft()[0]
        return self._reached

    @property
    def ahead(self) -> bool:
        """Marks are pending on the device, which wakes no thread."""
        return bool(self._ahead)


def after_arrival(attend: Attend, arrival: Arrival) -> Attend:
    """Wrap `attend` with waits for the loads of its layer."""

    def waiting(layer: int, new: Unturned) -> Tensor:
        arrival.hold(layer)
        return attend(layer, new)

    return waiting
