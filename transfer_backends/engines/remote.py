"""Engine of another rank: the leader's proxy, and the follower's thread that runs its frames.

    follower -> leader: Hello (once), Ended
    leader -> follower: ReachPeer, LeavePeer, Post, Probe, Fence, PollOften, Close

The leader numbers peers and operations.
"""

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from service.process.message_stream import ChannelClosed, ChannelFull, MessageStream
from transfer_backends.contract import Caps, Clock, EngineError, OpState, Pieces, RankMemory, Region
from transfer_backends.liveness import ProcessMark, bound, own_mark
from transfer_backends.ports import Engine

log = logging.getLogger(__name__)


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Frame, frozen=True):
    caps: Caps
    memory: RankMemory
    mark: ProcessMark


class Ended(_Frame, frozen=True):
    """Operations final since the last frame."""

    done: tuple[int, ...]
    failed: tuple[int, ...]
    error: str = ""


class ReachPeer(_Frame, frozen=True):
    peer: int
    incarnation: str
    descriptor: bytes


class LeavePeer(_Frame, frozen=True):
    peer: int


class PostPieces(_Frame, frozen=True, tag="Post"):
    op: int
    peer: int
    src: bytes
    dst: bytes
    lengths: bytes
    src_device: int | None
    dst_device: int | None

    @classmethod
    def of(cls, op: int, peer: int, pieces: Pieces) -> "PostPieces":
        src, dst, lengths = pieces.src.tobytes(), pieces.dst.tobytes(), pieces.lengths.tobytes()
        return cls(op, peer, src, dst, lengths, pieces.src_device, pieces.dst_device)

    @property
    def pieces(self) -> Pieces:
        src, dst, lengths = (np.frombuffer(data, np.uint64) for data in (self.src, self.dst, self.lengths))
        return Pieces(src, dst, lengths, self.src_device, self.dst_device)


class Probe(_Frame, frozen=True):
    op: int
    peer: int


class Fence(_Frame, frozen=True):
    op: int
    peer: int


class PollOften(_Frame, frozen=True):
    """Poll your engine often for a while: peers write."""


class Close(_Frame, frozen=True):
    """No operation is pending."""


ToFollower = ReachPeer | LeavePeer | PostPieces | Probe | Fence | PollOften | Close
ToLeader = Hello | Ended
_ENCODER = msgspec.msgpack.Encoder()
TO_FOLLOWER = msgspec.msgpack.Decoder(ToFollower)
TO_LEADER = msgspec.msgpack.Decoder(ToLeader)


def encode(frame: ToFollower | ToLeader) -> bytes:
    return _ENCODER.encode(frame)


# ---- the leader's proxy, which never waits

POLL_OFTEN_EVERY_S = 0.1  # the follower stays awake for longer


@dataclass(eq=False)
class RemoteOp:
    number: int
    state: OpState = OpState.PENDING


class RemoteEngine:
    """`ports.Engine` without `register` and `trial`, for one thread.

    Once the follower is gone (`lost`), posts are refused, no fence holds, and bytes may land until
    its process is proved dead. Connections are asynchronous: a failed one fails the operations on
    it.
    """

    def __init__(self, sock: socket.socket, *, name: str, timeout_s: float) -> None:
        """`timeout_s`: for the follower's start. Raises `EngineError`."""
        self.lost: str | None = None
        self._name = name
        self._follower = MessageStream(sock)
        self._pending: dict[int, RemoteOp] = {}
        self._last_number = 0
        self._poll_often_at_s = -POLL_OFTEN_EVERY_S
        hello = self._await_hello(timeout_s)
        self.caps, self.memory, self.mark = hello.caps, hello.memory, hello.mark
        self._name = f"{name} (pid {hello.mark.pid})"

    def _await_hello(self, timeout_s: float) -> Hello:
        poller = select.poll()
        poller.register(self._follower, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise EngineError(f"{self._name}: its transfer engine has not started within {timeout_s:g} s")
        try:
            hello = TO_LEADER.decode(self._follower.get(within_s=timeout_s))
        except ChannelClosed as error:
            raise EngineError(f"{self._name} ended before its transfer engine had started ({error})") from None
        assert isinstance(hello, Hello), "a follower begins with it"
        return hello

    def register(self, regions: Sequence[Region]) -> None:
        """The follower registers its own memory."""

    def descriptor(self) -> bytes:
        return self.memory.descriptor

    def connect(self, incarnation: str, descriptor: bytes) -> int:
        number = self._next()
        self._send(ReachPeer(number, incarnation, descriptor))
        return number

    def disconnect(self, peer: int) -> None:
        self._put(LeavePeer(peer))

    def post(self, peer: int, pieces: Pieces) -> RemoteOp:
        op = RemoteOp(self._next())
        return self._start(op, PostPieces.of(op.number, peer, pieces))

    def probe(self, peer: int) -> RemoteOp:
        op = RemoteOp(self._next())
        return self._start(op, Probe(op.number, peer))

    def trial(self, peer: int) -> None:
        """Bytes of another process cannot be measured here."""

    def fence(self, peer: int) -> RemoteOp:
        op = RemoteOp(self._next())
        return self._start(op, Fence(op.number, peer))

    def poll(self, op: RemoteOp) -> OpState:
        if op.state is OpState.PENDING:
            self._exchange()
        return op.state

    def progress(self, *, eager: bool = False) -> None:
        """`eager`: the follower polls more often for a while."""
        self._exchange()
        now_s = time.monotonic()
        if eager and now_s - self._poll_often_at_s >= POLL_OFTEN_EVERY_S:
            self._poll_often_at_s = now_s
            self._put(PollOften())

    def close(self) -> None:
        if self.lost is None:
            try:
                self._follower.put(encode(Close()))
            except (ChannelClosed, ChannelFull) as error:
                log.warning("%s: its transfer engine was not closed: %s", self._name, error)
        self.lost = self.lost or f"{self._name}: its transfer engine is closed"
        self._follower.close()

    # ---- inside

    def _next(self) -> int:
        self._last_number += 1
        return self._last_number

    def _start(self, op: RemoteOp, frame: ToFollower) -> RemoteOp:
        self._send(frame)
        self._pending[op.number] = op
        return op

    def _send(self, frame: ToFollower) -> None:
        """Raises `EngineError`."""
        self._put(frame)
        if self.lost is not None:
            raise EngineError(self.lost)

    def _put(self, frame: ToFollower) -> None:
        if self.lost is not None:
            return
        try:
            self._follower.put(encode(frame))
        except (ChannelClosed, ChannelFull) as error:
            self._exchange()  # frames sent before its end count
            self._lose(str(error))

    def _exchange(self) -> None:
        if self.lost is not None:
            return
        try:
            for data in self._follower.arrived():
                frame = TO_LEADER.decode(data)
                if isinstance(frame, Ended):
                    self._end(frame)
        except ChannelClosed:
            self._lose("its process, or its thread, has ended")

    def _end(self, ended: Ended) -> None:
        for numbers, state in ((ended.done, OpState.DONE), (ended.failed, OpState.FAILED)):
            for number in numbers:
                self._pending.pop(number).state = state
        if ended.error:
            log.warning("%s: a write failed: %s", self._name, ended.error)

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = f"{self._name}: its transfer engine is lost: {why}"
        log.error("%s", self.lost)
        self._follower.shut()  # its process ends
        for op in self._pending.values():
            op.state = OpState.FAILED
        self._pending.clear()


# ---- the follower's side: one thread

FIRST_BACKOFF_S = 0.0001
STALE_BACKOFF_S = 0.02  # after a while without an end: a peer hangs
STALE_AFTER_BACKOFFS = 500
EAGER_S = 0.25  # after `PollOften`; the next one comes earlier if needed
EAGER_POLL_S = 0.001
TICK_S = 0.02  # for an engine that peers write to and that must be polled


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
        """None to wait for a frame."""
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
