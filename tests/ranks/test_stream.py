"""The channel of a leader and a follower: a socket pair, and TCP as between two machines."""

import select
import socket
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from engine.ranks.messages import PoolSize, Ready, Step, follower_end, leader_end
from service.process import message_stream
from service.process.message_stream import LENGTH, ChannelClosed, ChannelFull, MessageStream, socket_pair
from tests.engine.ranks.ranks_in_process import tcp_pair

SOON_S = 10.0
Make = Callable[[], tuple[socket.socket, socket.socket]]
ways = pytest.mark.parametrize("pair", [socket_pair, tcp_pair])


def step(number: int, drops: int) -> Step:
    return Step(number, False, [], [], [], [], [], [], [], [], drops=list(range(100_000, 100_000 + drops)))


@ways
def test_messages_that_the_socket_does_not_take_wait_and_come_in_order(pair: Make) -> None:
    """Far more bytes than a socket holds, while the other end reads nothing yet; none of them waits in `send`."""
    own, theirs = pair()
    steps = [step(number, 500_000) for number in range(1, 3)] + [step(number, 3) for number in range(3, 50)]
    with closing(leader_end(own)) as leader, closing(follower_end(theirs.detach())) as follower:
        for message in steps:
            leader.send(message)
        assert [follower.receive() for _ in steps] == steps
        follower.send(Ready(7, "f"))
        assert leader.receive() == Ready(7, "f")


@ways
def test_what_waits_is_bounded(pair: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_stream, "MAX_UNSENT_BYTES", 1 << 16)
    own, theirs = pair()
    with closing(leader_end(own)) as leader, theirs, pytest.raises(ChannelFull):
        for _ in range(10_000):
            leader.send(step(1, 1000))


@ways
def test_the_end_of_either_side_is_the_channels(pair: Make) -> None:
    own, theirs = pair()
    with closing(leader_end(own)) as leader, closing(follower_end(theirs.detach())) as follower:

        def wait() -> None:
            with pytest.raises(ChannelClosed):
                follower.receive()

        waiting = threading.Thread(target=wait)
        waiting.start()
        leader.shut()
        waiting.join(SOON_S)
        assert not waiting.is_alive()
        with pytest.raises(ChannelClosed):
            leader.receive()
        with pytest.raises(ChannelClosed):
            for _ in range(1000):
                follower.send(PoolSize(1))


@ways
def test_a_length_that_no_message_has_closes_the_channel(pair: Make) -> None:
    own, theirs = pair()
    with closing(leader_end(own)) as leader, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ChannelClosed, match="a message of 4294967295 bytes"):
            leader.receive()


@ways
def test_what_has_arrived_is_read_without_a_wait_however_it_is_cut(pair: Make) -> None:
    own, theirs = pair()
    with closing(MessageStream(own)) as stream:
        assert stream.arrived() == []
        wire = b"".join(LENGTH.pack(len(data)) + data for data in (b"one", b"", b"three"))
        found = []
        with theirs:
            for byte in wire:
                theirs.sendall(bytes([byte]))
                select.select([stream], [], [], SOON_S)
                found += stream.arrived()
            assert found == [b"one", b"", b"three"]
            theirs.sendall(wire + wire[:5])
        select.select([stream], [], [], SOON_S)
        while len(found) < 6:
            found += stream.arrived()  # what came before the end counts
        assert found[3:] == found[:3]
        with pytest.raises(ChannelClosed):
            while True:
                stream.arrived()
