"""The KV of steps, layer by layer: what the stream waits for before a layer, and how far it has come.

Marks are set by the runner and read by another thread. Marking never waits: on CUDA it is an event behind the kernels, elsewhere a tuple.
"""

from collections import deque
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from engine.kv.arrival import Arrival
from engine.layers.rope import Unturned
from engine.models.attention import Attend

Mark = tuple[int, int]  # (step, layers): the first `layers` of it are written, and all of every earlier step


class LayerMarks:
    """`more_follows`: a drafter writes behind the model's layers, which counts as one more layer (`all_written`)."""

    def __init__(self, device: torch.device, *, more_follows: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._more_follows = more_follows
        self._ends: frozenset[int] = frozenset()
        self._wake: Callable[[], None] = lambda: None
        self._reached: Mark = (-1, 0)
        self._ahead: deque[tuple[Mark, torch.cuda.Event]] = deque()  # enqueued; the device is not there yet

    def watch(self, ends: Collection[int], wake: Callable[[], None]) -> None:
        """Mark when each number of layers in `ends` is written, and then call `wake` in the stream's thread."""
        self._ends, self._wake = frozenset(ends), wake

    @property
    def watched(self) -> bool:
        return bool(self._ends)

    def attend(self, step: int, attend: Attend, arrival: Arrival) -> Attend:
        """Wrap `attend` so that it waits for a layer of `arrival` and marks it. Call it once a step, just before the forward."""
        if not self._ends:
            return attend if arrival.is_held else _waiting(attend, arrival)
        self._mark((step, 0))

        def marked(layer: int, new: Unturned) -> Tensor:
            arrival.hold(layer)
            out = attend(layer, new)
            if layer + 1 in self._ends:
                self._mark((step, layer + 1))
            return out

        return marked

    def whole(self, step: int, forward: Callable[[], Tensor]) -> Tensor:
        """Run a recorded forward, and mark its layers together: one launch computes them all."""
        if not self._ends:
            return forward()
        self._mark((step, 0))
        out = forward()
        if not self._more_follows:
            self.all_written(step)
        return out

    def all_written(self, step: int) -> None:
        """Mark the end of a step's KV, the drafter's included."""
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
        """Return the last mark that the device has reached. One thread at a time may call it."""
        while self._ahead and self._ahead[0][1].query():
            self._reached = self._ahead.popleft()[0]
        return self._reached

    @property
    def ahead(self) -> bool:
        """Whether the device has still to reach marks; it wakes no thread then."""
        return bool(self._ahead)


def _waiting(attend: Attend, arrival: Arrival) -> Attend:
    def waiting(layer: int, new: Unturned) -> Tensor:
        arrival.hold(layer)
        return attend(layer, new)

    return waiting
