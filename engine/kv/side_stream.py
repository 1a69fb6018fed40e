"""Streams next to the main one, concurrent unless ordered by marks. Only `Mark.wait` blocks."""

from collections.abc import Callable

import torch


class Mark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def hold_main(self) -> None:
        """Order later main stream work after it."""
        torch.cuda.current_stream().wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        return Mark(self._stream)

    def follow(self, mark: Mark) -> None:
        """Order later work here after `mark`."""
        self._stream.wait_event(mark.event)

    def follow_main(self) -> None:
        """Order later work here after the main stream's."""
        self._stream.wait_stream(torch.cuda.current_stream())
