"""Streams next to the main one, concurrent unless ordered by marks. Only `Mark.wait` blocks."""

from collections.abc import Callable
from typing import Protocol, Self

import torch


class Mark(Protocol):
    def hold_main(self) -> None:
        """Order later main stream work after it."""

    def wait(self) -> None: ...


class SideStream(Protocol):
    def run(self, work: Callable[[], None]) -> None: ...

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """Order later work here after `mark`."""

    def follow_main(self) -> None:
        """Order later work here after the main stream's."""


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
