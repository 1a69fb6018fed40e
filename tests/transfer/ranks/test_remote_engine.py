"""The engine of another rank by way of its socket: results come back, nothing blocks, and a lost follower fails what it had."""

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from service.process.message_stream import ChannelClosed, MessageStream, socket_pair
from tests.transfer.engines.hand_engine import HandEngine
from tests.transfer.rig import until
from transfer_backends.contract import EngineError, OpState, Pieces, RankMemory, Region
from transfer_backends.engines.remote import (
    EAGER_POLL_S,
    EAGER_S,
    STALE_AFTER_BACKOFFS,
    STALE_BACKOFF_S,
    TICK_S,
    TO_FOLLOWER,
    Close,
    Ended,
    EngineServer,
    Fence,
    Hello,
    LeavePeer,
    PollOften,
    PostPieces,
    Probe,
    ReachPeer,
    RemoteEngine,
    encode,
    serve_engine,
)
from transfer_backends.liveness import Liveness, liveness, own_mark

MEMORY = RankMemory(Region(1 << 20, 64, 64, None), 1, 1, 0, 4)
ONE = Pieces.one(1, 2, 3)
DONE, FAILED, PENDING = OpState.DONE, OpState.FAILED, OpState.PENDING


def two_ends(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    ends = socket_pair()
    for end in ends:
        stack.callback(end.close)
    return ends


@dataclass
class Follower:
    """Serves `engine` in a thread; `remote` is the leader's end."""

    engine: HandEngine
    stack: ExitStack
    receives: bool = False
    ends: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        mine, theirs = two_ends(self.stack)
        self.thread = threading.Thread(target=self._serve, args=(theirs,))
        self.thread.start()
        self.remote = RemoteEngine(mine, name="rank 1", timeout_s=10.0)
        self.stack.callback(self.end)

    def _serve(self, sock: socket.socket) -> None:
        self.ends.append(serve_engine(self.engine, MEMORY, sock, receives=self.receives, host="127.0.0.1"))

    def end(self) -> None:
        if self.remote.lost is None:
            self.remote.close()
        self.thread.join(10.0)
        assert not self.thread.is_alive()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def test_operations_run_there_and_end_here(stack: ExitStack) -> None:
    follower = Follower(HandEngine(), stack)
    remote, engine = follower.remote, follower.engine
    assert remote.caps == engine.caps and remote.memory.descriptor == remote.descriptor() == b"by hand"
    assert engine.registered == [MEMORY.kv] and remote.memory.units == MEMORY.units
    peer = remote.connect("d", b"there")
    ops = {"post": remote.post(peer, ONE), "probe": remote.probe(peer), "fence": remote.fence(peer)}
    until(lambda: len(engine.ops) == 3)
    assert engine.connected == [("d", b"there")] and {remote.poll(op) for op in ops.values()} == {PENDING}
    for what, state in (("fence", DONE), ("post", FAILED), ("probe", DONE)):
        engine.end(what, state)
        until(lambda: remote.poll(ops[what]) is not PENDING)  # noqa: B023
        assert remote.poll(ops[what]) is state
    remote.disconnect(peer)
    until(lambda: engine.connected == [])
    remote.close()
    follower.thread.join(10.0)
    assert engine.closed and follower.ends == [True]


def test_what_the_other_engine_refuses_fails_the_operation(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    follower = Follower(HandEngine(), stack)
    remote, engine = follower.remote, follower.engine
    peer = remote.connect("d", b"")
    until(lambda: engine.connected)
    engine.refuses = {"post", "connect"}
    post = remote.post(peer, ONE)
    until(lambda: remote.poll(post) is FAILED)
    probe = remote.probe(remote.connect("e", b""))
    until(lambda: remote.poll(probe) is FAILED)
    assert "rank 1 (pid" in caplog.text
    assert all(f"EngineError: {what} is refused" in caplog.text for what in ("post", "connect"))
    engine.refuses = {"poll"}  # the thread survives it
    op = remote.fence(peer)
    until(lambda: remote.poll(op) is FAILED)


def test_a_lost_follower_fails_all_it_had_and_refuses_the_rest(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """No fence holds any more: what it had started may still land."""
    mine, theirs = two_ends(stack)
    follower = MessageStream(theirs)
    follower.put(encode(Hello(HandEngine().caps, MEMORY, own_mark())))
    remote = RemoteEngine(mine, name="rank 3", timeout_s=10.0)
    peer = remote.connect("d", b"")
    ops = [remote.post(peer, ONE), remote.fence(peer)]
    follower.put(encode(Ended((ops[0].number,), ())))  # what it said before its end counts
    theirs.close()
    until(lambda: remote.poll(ops[1]) is FAILED)
    assert remote.poll(ops[0]) is DONE
    assert remote.lost is not None and remote.lost in caplog.text
    for refused in (lambda: remote.post(peer, ONE), lambda: remote.fence(peer), lambda: remote.connect("e", b"")):
        with pytest.raises(EngineError, match=r"rank 3 \(pid \d+\): its transfer engine is lost"):
            refused()
    remote.disconnect(peer)
    remote.progress(eager=True)
    remote.close()


def test_a_leader_that_is_gone_ends_the_thread_and_closes_nothing(stack: ExitStack) -> None:
    """Writes may still run: the process has to end, and until then its port is bound."""
    follower = Follower(HandEngine(), stack)
    mark = replace(follower.remote.mark, host="another machine")
    op = follower.remote.post(follower.remote.connect("d", b""), ONE)
    until(lambda: follower.engine.ops)
    follower.remote._follower.close()
    follower.thread.join(10.0)
    assert follower.ends == [False] and not follower.engine.closed and op.state is PENDING
    gc.collect()
    assert liveness(mark, "127.0.0.1:1") is Liveness.ALIVE
    follower.remote.lost = "closed by the test"


def test_posts_do_not_wait_for_a_follower_that_does_not_read(stack: ExitStack) -> None:
    """More than its socket holds; all arrive, in order, once it reads."""
    mine, theirs = two_ends(stack)
    follower, came = MessageStream(theirs), list[Any]()
    follower.put(encode(Hello(HandEngine().caps, MEMORY, own_mark())))
    remote = RemoteEngine(mine, name="rank 1", timeout_s=10.0)
    many = Pieces(*(np.arange(1024, dtype=np.uint64) + first for first in (0, 5000, 1)))
    peer = remote.connect("d", b"")
    ops = [remote.post(peer, many) for _ in range(100)]
    while len(came) < 1 + len(ops):
        came.append(TO_FOLLOWER.decode(follower.get()))
        assert remote.poll(ops[0]) is PENDING
    assert [frame.op for frame in came[1:]] == [op.number for op in ops]
    last = came[-1].pieces
    for name in ("src", "dst", "lengths"):
        assert (getattr(last, name) == getattr(many, name)).all()
    remote.close()


def test_a_follower_that_never_reads_is_lost_and_has_to_end(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = two_ends(stack)
    follower = MessageStream(theirs)
    follower.put(encode(Hello(HandEngine().caps, MEMORY, own_mark())))
    remote = RemoteEngine(mine, name="rank 1", timeout_s=10.0)
    first = remote.fence(remote.connect("d", b""))
    with pytest.raises(EngineError, match="its transfer engine is lost: its messages pile up"):
        for _ in range(1000):
            remote.connect("d", bytes(1 << 16))
    assert remote.poll(first) is FAILED and "pile up" in caplog.text
    with pytest.raises(ChannelClosed):
        while True:
            follower.get()


def test_a_follower_that_does_not_start_is_named(stack: ExitStack) -> None:
    for ends, said in ((False, r"rank 1: its transfer engine has not started within 0\.01 s"), (True, "rank 1 ended")):
        mine, theirs = two_ends(stack)
        if ends:
            theirs.close()
        with pytest.raises(EngineError, match=said):
            RemoteEngine(mine, name="rank 1", timeout_s=0.01)


@pytest.mark.parametrize("receives", [False, True])
def test_a_port_is_bound_for_as_long_as_a_follower_serves(stack: ExitStack, receives: bool) -> None:
    """For decode workers on other machines that it writes to, also as a decode worker's; those on this one look at its process."""
    writer = Follower(HandEngine(), stack, receives=receives)
    mark = writer.remote.mark
    elsewhere = replace(mark, host="another machine")
    assert liveness(elsewhere, "127.0.0.1:1") is Liveness.ALIVE
    writer.end()
    assert liveness(elsewhere, "127.0.0.1:1") is Liveness.DEAD


def test_decode_s_follower_polls_often_when_asked(stack: ExitStack) -> None:
    follower = Follower(HandEngine(target_must_poll=True), stack, receives=True)
    until(lambda: follower.engine.polls)  # by itself, now and then
    before = follower.engine.polls
    follower.remote.progress(eager=True)
    until(lambda: follower.engine.polls > before + 2)


def test_how_long_a_follower_rests() -> None:
    """Without an end while nothing runs, shortly while something does, longer when nothing ends."""
    engine, now = HandEngine(), [0.0]
    server = EngineServer(engine, receives=False, clock=lambda: now[0])
    assert server.nap_s is None
    server.turn([ReachPeer(1, "d", b""), PostPieces.of(2, 1, ONE)])
    naps = []
    while server.nap_s != STALE_BACKOFF_S:
        naps.append(server.nap_s)
        assert server.turn([]) is None
    assert naps[0] == 0.0001 and max(naps) == engine.caps.longest_nap_s and len(naps) == STALE_AFTER_BACKOFFS + 1
    engine.end("post")
    assert server.turn([]) == Ended((2,), ()) and server.nap_s is None
    ended = server.turn([Probe(3, 9), Fence(4, 1), LeavePeer(9)])  # of a peer that is not connected
    assert ended == Ended((), (3,))
    server.turn([Close()])
    assert server.closed
    polled = EngineServer(HandEngine(target_must_poll=True), receives=True, clock=lambda: now[0])
    assert polled.nap_s == TICK_S
    polled.turn([PollOften()])
    assert polled.nap_s == EAGER_POLL_S
    now[0] += EAGER_S
    assert polled.nap_s == TICK_S
