"""Proxy of another rank's engine, served by a follower process (`serve.py`). Never waits."""

import logging
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from service.process.message_stream import ChannelClosed, ChannelFull, MessageStream
from transfer_backends.contract import Clock, EngineError, OpState, Pieces, Region
from transfer_backends.ranks.frames import (
    TO_LEADER,
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

POLL_OFTEN_EVERY_S = 0.1  # the follower stays awake for longer

log = logging.getLogger(__name__)


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

    def __init__(self, sock: socket.socket, *, name: str, timeout_s: float, clock: Clock = time.monotonic) -> None:
        """`timeout_s`: for the follower's start. Raises `EngineError`."""
        self.lost: str | None = None
        self._name = name
        self._follower = MessageStream(sock)
        self._clock = clock
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
        """Let the follower poll more often for a while."""
        self._exchange()
        now_s = self._clock()
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
