"""The loop's sockets, real ones."""

import os

import pytest

from engine.ipc import IpcPaths, PullSocket, addressed, row_of
from engine.loop.loop import SocketPorts
from engine.messages import ControlReply, SchedulerReady, ToFrontend, TokenBatch, TokenOutput


def test_a_late_call_for_attention_is_no_error_and_writes_to_no_reused_descriptor() -> None:
    ipc = IpcPaths.create()
    ports = SocketPorts(ipc)
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


@pytest.mark.parametrize("name", ["a", "a:b@7", "@1", "recompute-7-1", ":", "ü@2:x"])
@pytest.mark.parametrize("row", [0, 1, 63])
def test_the_wire_rid_routes_answers_for_any_name_of_a_client(name: str, row: int) -> None:
    assert row_of(addressed(f"{name}:1f", row)) == row


def test_each_frontend_receives_its_own_outputs_and_the_main_one_all_replies() -> None:
    ipc = IpcPaths.create()
    pulls: list[PullSocket[ToFrontend]] = [PullSocket(ipc.to_frontend_of(row), ToFrontend) for row in range(3)]
    ports = SocketPorts(ipc, num_frontends=3)
    try:
        ports.to_frontend(SchedulerReady({}))
        outputs = [TokenOutput(rid=addressed(f"x:{i}", row), new_ids=[i]) for i, row in enumerate((2, 0, 2))]
        ports.to_frontend(TokenBatch([*outputs, TokenOutput(rid="recompute-7-1", new_ids=[3])]))
        ports.to_frontend(ControlReply("c1", True, ""))
        received = [take(pull, count) for pull, count in zip(pulls, (3, 1, 2), strict=True)]
        tokens = [
            [output.new_ids for message in messages if isinstance(message, TokenBatch) for output in message.outputs]
            for messages in received
        ]
        assert tokens == [[[1], [3]], [], [[0], [2]]]
        assert isinstance(received[0][-1], ControlReply)
    finally:
        for pull in pulls:
            pull.close()
        ports.close()
        ipc.remove()


def take(pull: PullSocket[ToFrontend], count: int) -> list[ToFrontend]:
    messages: list[ToFrontend] = []
    while len(messages) < count:
        arrived = pull.recv(10.0)
        assert arrived, messages
        messages += arrived
    assert len(messages) == count, messages
    return messages
