"""The loop's sockets, real ones."""

import os

import pytest

from engine.ipc import IpcPaths
from engine.loop.ports import ZmqPorts


def test_who_calls_for_attention_after_the_end_is_heard_by_nobody() -> None:
    """SIGTERM and threads may come late: not an error, and never a write to whoever has the file descriptor by then."""
    ipc = IpcPaths.create()
    ports = ZmqPorts(ipc)
    ports.call_attention()
    ports.wait(60.0)  # ended by the call

    ports.close()
    ipc.remove()
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]  # one of them has the number that is free now
    try:
        ports.call_attention()
        for other in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other)
    finally:
        for other in others:
            os.close(other)
