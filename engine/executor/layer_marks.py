"""How far the stream has got with the KV of its steps, layer by layer: marked by the runner, read by another thread.

Marking costs the stream nothing to speak of and never waits: on CUDA an event behind the kernels, elsewhere a tuple.
Must not know who reads, or why.
"""

from collections import deque
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from engine.models.causal_lm import Attend

Mark = tuple[int, int]  # (step, layers): the first `layers` of it are written, and all of every earlier step


class LayerMarks:
    """Nobody watches at first: then nothing is marked."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._ends: frozenset[int] = frozenset()
        self._wake: Callable[[], None] = lambda: None
        self._reached: Mark = (-1, 0)
        self._ahead: deque[tuple[Mark, torch.cuda.Event]] = deque()  # enqueued; the device is not there yet

    def watch(self, ends: Collection[int], wake: Callable[[], None]) -> None:
        """From the next step on. A mark is set where `ends` layers are written; `wake` is called in the stream's thread."""
        self._ends, self._wake = frozenset(ends), wake

    @property
    def watched(self) -> bool:
        return bool(self._ends)

    def attend(self, step: int, attend: Attend) -> Attend:
        """`attend`, marking. To be called once a step, when all that comes before its forward has been enqueued."""
        if not self._ends:
            return attend
        self._mark((step, 0))

        def marked(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(layer, q, k, v)
            if layer + 1 in self._ends:
                self._mark((step, layer + 1))
            return out

        return marked

    def _mark(self, mark: Mark) -> None:
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._ahead.append((mark, event))
        else:
            self._reached = mark
        self._wake()

    def reached(self) -> Mark:
        """To be called by one thread at a time."""
        while self._ahead and self._ahead[0][1].query():
            self._reached = self._ahead.popleft()[0]
        return self._reached

    @property
    def ahead(self) -> bool:
        """Marks are on their way: nobody is woken when the device comes by."""
        return bool(self._ahead)
