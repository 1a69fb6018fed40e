"""The loop's sockets, real ones."""

import os

import pytest

from engine.frontend.ipc import IpcPaths, PullSocket
from engine.loop.ports import ZmqPorts
from engine.messages import RequestOpened, ToDetokenizer, TokenBatch, TokenOutput


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


def test_the_detokenizer_hears_of_a_request_with_the_first_that_is_said_and_before_it() -> None:
    ipc = IpcPaths.create()
    detokenizer: PullSocket[ToDetokenizer] = PullSocket(ipc.to_detokenizer, ToDetokenizer)
    ports = ZmqPorts(ipc)
    opened = [RequestOpened(rid=rid, prompt_tail=[1], stop=(), skip_special_tokens=True) for rid in ("a", "b")]
    first, second = (TokenBatch([TokenOutput(rid=rid, new_ids=[5])]) for rid in ("b", "a"))
    try:
        for request in opened:
            ports.to_detokenizer(request)
        ports.to_detokenizer(first)
        ports.to_detokenizer(second)
        heard: list[ToDetokenizer] = []
        while len(heard) < 4:
            some = detokenizer.recv(10.0)
            assert some, f"only {heard} came"
            heard += some
        assert heard == [*opened, first, second]
    finally:
        ports.close()
        detokenizer.close()
        ipc.remove()
