"""Streams beside the one that computes: what runs there runs at the same time, except where a mark orders it.

"main" is the stream on which the caller's work is enqueued (torch's current stream). Nothing here waits but `Mark.wait`.
"""

from collections.abc import Callable
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """A place in a stream; reached once everything enqueued before it has run."""

    def hold_main(self) -> None:
        """Let what is enqueued on main from now on run after it."""

    def wait(self) -> None:
        """Block the calling thread until it is reached."""


class SideStream(Protocol):
    """First in, first out."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue `work`."""

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """Let what is enqueued here from now on run after `mark`, a mark of any of these streams."""

    def follow_main(self) -> None:
        """Let what is enqueued here from now on run after what main has by now."""


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def hold_main(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class CudaSideStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @classmethod
    def on(cls, device: torch.device) -> Self:
        return cls(torch.cuda.Stream(device))

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    def follow_main(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
