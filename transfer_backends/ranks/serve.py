"""Follower's side of its transfer engine: one thread that runs the leader's frames."""

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from service.process.message_stream import ChannelClosed, ChannelFull, MessageStream
from transfer_backends.contract import Clock, OpState, RankMemory
from transfer_backends.liveness import bound, own_mark
from transfer_backends.ports import Engine
from transfer_backends.ranks.frames import (
    TO_FOLLOWER,
    Close,
    Ended,
    Fence,
    Hello,
    LeavePeer,
    PollOften,
    PostPieces,
    Probe,
    ReachPeer,
    ToFollower,
    encode,
)

FIRST_BACKOFF_S = 0.0001
STALE_BACKOFF_S = 0.02  # after a while without an end: a peer hangs
STALE_AFTER_BACKOFFS = 500
EAGER_S = 0.25  # after `PollOften`; the next one comes earlier if needed
EAGER_POLL_S = 0.001
TICK_S = 0.02  # for an engine that peers write to and that must be polled

log = logging.getLogger(__name__)


def serve_engine(engine: Engine, memory: RankMemory, sock: socket.socket, *, receives: bool, host: str) -> bool:
    """Serve until the leader closes the engine (True), or is gone (False: end this process soon).

    A port at `host` stays bound until this process ends: its refusal proves to remote decode
    workers that the process is dead.
    """
    leader = MessageStream(sock)
    engine.register([memory.kv, *(pool.region for pool in memory.pools)])
    described = msgspec.structs.replace(memory, descriptor=engine.descriptor())
    with sock, contextlib.ExitStack() as at_end:
        alive = at_end.enter_context(bound(host))
        mark = msgspec.structs.replace(own_mark(), port=alive.getsockname()[1], address=host)
        try:
            leader.put(encode(Hello(engine.caps, described, mark)))
            _serve(EngineServer(engine, receives=receives), leader)
        except (ChannelClosed, ChannelFull) as error:
            log.warning("transfer engine: the leader cannot be reached: %s", error)
            alive.detach()  # bound until the process ends: started writes may still run
            return False
        engine.close()
        return True


def _serve(server: "EngineServer", leader: MessageStream) -> None:
    """Raises ChannelClosed and ChannelFull."""
    poller = select.poll()
    poller.register(leader, select.POLLIN)
    while not server.closed:
        _rest(poller, server.nap_s)
        if (ended := server.turn([TO_FOLLOWER.decode(data) for data in leader.arrived()])) is not None:
            leader.put(encode(ended))


def _rest(poller: "select.poll", nap_s: float | None) -> None:
    if nap_s is None:
        poller.poll()
    elif nap_s < 0.001:  # `poll` counts in milliseconds
        time.sleep(nap_s)
    else:
        poller.poll(nap_s * 1000)


class EngineServer:
    def __init__(self, engine: Engine, *, receives: bool, clock: Clock = time.monotonic) -> None:
        self.closed = False
        self._engine = engine
        self._clock = clock
        self._polls = receives and engine.caps.target_must_poll
        self._peers: dict[int, Any] = {}
        self._running: dict[int, Any] = {}
        self._failed: list[int] = []
        self._error = ""
        self._naps = 0
        self._eager_until_s = -1.0

    @property
    def nap_s(self) -> float | None:
        """Seconds, or None to wait for a frame."""
        waits: list[float] = []
        if self._running:
            nap_s = min(FIRST_BACKOFF_S * 2 ** min(self._naps, 10), self._engine.caps.longest_nap_s)
            waits.append(STALE_BACKOFF_S if self._naps > STALE_AFTER_BACKOFFS else nap_s)
        if self._polls:
            waits.append(EAGER_POLL_S if self._clock() < self._eager_until_s else TICK_S)
        return min(waits, default=None)

    def turn(self, frames: list[ToFollower]) -> Ended | None:
        for frame in frames:
            self._run(frame)
        if self._polls:
            self._engine.progress()
        done = self._poll()
        self._naps = 0 if frames or done or self._failed else self._naps + 1
        if not done and not self._failed:
            return None
        ended = Ended(tuple(done), tuple(self._failed), self._error)
        self._failed, self._error = [], ""
        return ended

    def _run(self, frame: ToFollower) -> None:
        match frame:
            case PostPieces():
                self._start(frame.op, frame.peer, lambda peer: self._engine.post(peer, frame.pieces))
            case Probe():
                self._start(frame.op, frame.peer, self._engine.probe)
            case Fence():
                self._start(frame.op, frame.peer, self._engine.fence)
            case ReachPeer():
                with self._noting():
                    self._peers[frame.peer] = self._engine.connect(frame.incarnation, frame.descriptor)
            case LeavePeer():
                with self._noting():
                    if (peer := self._peers.pop(frame.peer, None)) is not None:
                        self._engine.disconnect(peer)
            case PollOften():
                self._eager_until_s = self._clock() + EAGER_S
            case Close():
                self.closed = True

    def _start(self, op: int, peer: int, start: Callable[[Any], Any]) -> None:
        if peer in self._peers:
            with self._noting():
                self._running[op] = start(self._peers[peer])
                return
        self._failed.append(op)

    @contextlib.contextmanager
    def _noting(self) -> Any:
        try:
            yield
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _poll(self) -> list[int]:
        done: list[int] = []
        for number, op in list(self._running.items()):
            state = OpState.FAILED
            with self._noting():
                state = self._engine.poll(op)
            if state is OpState.PENDING:
                continue
            del self._running[number]
            (done if state is OpState.DONE else self._failed).append(number)
        return done
