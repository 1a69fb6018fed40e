"""The channel of two machines: TCP connections here, of one process."""

import threading
from contextlib import closing

import pytest

from engine.ranks import stream
from engine.ranks.channel import follower_end, leader_end
from engine.ranks.ends import ChannelClosed, ChannelFull
from engine.ranks.messages import PoolSize, Ready, Step
from tests.engine.ranks_in_process import tcp_pair

SOON_S = 10.0


def step(number: int, drops: int) -> Step:
    return Step(number, False, [], [], [], [], [], [], [], [], drops=list(range(100_000, 100_000 + drops)))


def test_messages_that_the_socket_does_not_take_wait_and_come_in_order() -> None:
    """Far more bytes than a socket holds, while the other end reads nothing yet; none of them waits in `send`."""
    own, theirs = tcp_pair()
    steps = [step(number, 500_000) for number in range(1, 3)] + [step(number, 3) for number in range(3, 50)]
    with closing(leader_end(own)) as leader, closing(follower_end(theirs.detach())) as follower:
        for message in steps:
            leader.send(message)
        assert [follower.receive() for _ in steps] == steps
        follower.send(Ready(7, "f"))
        assert leader.receive() == Ready(7, "f")


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_UNSENT_BYTES", 1 << 16)
    own, theirs = tcp_pair()
    with closing(leader_end(own)) as leader, theirs, pytest.raises(ChannelFull):
        for _ in range(10_000):
            leader.send(step(1, 1000))


def test_the_end_of_either_side_is_the_channels() -> None:
    own, theirs = tcp_pair()
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


def test_a_length_that_no_message_has_closes_the_channel() -> None:
    own, theirs = tcp_pair()
    with closing(leader_end(own)) as leader, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ChannelClosed, match="a message of 4294967295 bytes"):
            leader.receive()
