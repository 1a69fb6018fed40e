"""The loop's sockets, real ones."""

import os

import pytest

from engine.ipc import IpcPaths
from engine.loop.ports import ZmqPorts


def test_a_late_call_for_attention_is_no_error_and_writes_to_no_reused_descriptor() -> None:
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
