"""The sockets between the processes of one worker: typed ZMQ PUSH/PULL over ipc:// in a private directory.

One msgspec struct is one message. The receiver binds, senders connect.
"""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

M = TypeVar("M")

log = logging.getLogger(__name__)

IPC_PREFIX = "tandem-ipc-"
MAX_QUEUED_MESSAGES = 100_000  # in one pipe; a receiver this far behind is stuck
MAX_MESSAGE_BYTES = 1 << 30
LINGER_MS = 500  # of a closing sender
RECV_BURST = 256  # messages before the event loop serves something else
MAIN_FRONTEND = 0  # row of the frontend that every worker has


def addressed(rid: str, row: int) -> str:
    """A request's name on the wire ("NAME:NUMBER"), marked with the frontend that answers go to. The main one needs no mark."""
    return f"{rid}@{row}" if row else rid


def row_of(rid: str) -> int:
    """The frontend that sent the request of this name on the wire."""
    mark = rid.rpartition(":")[2].partition("@")[2]
    return int(mark) if mark else MAIN_FRONTEND


class PeerStalled(RuntimeError):
    """The receiver is dead or far behind: its queue is full."""


@dataclass(frozen=True)
class IpcPaths:
    """Endpoints of one worker, as the scheduler of one of its DP ranks has them. `dir` is 0700: the file system is the
    access control.
    """

    dir: str
    dp_rank: int = 0

    @classmethod
    def create(cls, parent: str | None = None) -> "IpcPaths":
        """Make a private directory (short: a unix socket path has at most 107 characters); remove those of dead owners."""
        folder = Path(parent or tempfile.gettempdir())
        for left in folder.glob(f"{IPC_PREFIX}*"):
            if _is_orphan(left):
                shutil.rmtree(left, ignore_errors=True)
        return cls(tempfile.mkdtemp(prefix=f"{IPC_PREFIX}{os.getpid()}-", dir=folder))

    @property
    def to_scheduler(self) -> str:
        return self._endpoint("scheduler")

    @property
    def to_heartbeat(self) -> str:
        return self._endpoint("heartbeat")

    @property
    def to_frontend(self) -> str:
        return self.to_frontend_of(MAIN_FRONTEND)

    def to_frontend_of(self, row: int) -> str:
        return self._endpoint(addressed("frontend", row))

    def of_ranks(self, dp_size: int) -> "list[IpcPaths]":
        return [IpcPaths(self.dir, rank) for rank in range(dp_size)]

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self.dir}/{name}{f'.{self.dp_rank}' if self.dp_rank else ''}"

    def http_socket(self, row: int) -> Path:
        """Where a frontend answers the other frontends of its worker."""
        return Path(self.dir, f"http{row}")

    @property
    def frontend_spec(self) -> Path:
        return Path(self.dir, "frontend.json")

    def remove(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)


def _is_orphan(folder: Path) -> bool:
    pid = folder.name.removeprefix(IPC_PREFIX).partition("-")[0]
    try:
        mine = folder.stat().st_uid == os.getuid()
    except OSError:
        return False
    return mine and pid.isdigit() and not Path(f"/proc/{pid}").exists()


class PullSocket(Generic[M]):
    """Receives `union`. Frames that do not decode are logged, counted in `rejected` and dropped."""

    def __init__(self, endpoint: str, union: Any) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.bind(endpoint)
        self.rejected = 0
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[M], None] | None = None

    @property
    def fd(self) -> int:
        """Edge-triggered: after it signals, call `recv_all_nowait` until it returns nothing."""
        return int(self.socket.getsockopt(zmq.FD))

    def recv_all_nowait(self, limit: int = 1 << 30) -> list[M]:
        """Take at most `limit` messages that have arrived."""
        messages: list[M] = []
        while len(messages) < limit and self._has_frame():
            self._append(self.socket.recv(zmq.NOBLOCK), messages)
        return messages

    def recv(self, timeout_s: float) -> list[M]:
        """Wait up to `timeout_s` for a message, then take all that have arrived."""
        self.socket.poll(int(timeout_s * 1000))
        return self.recv_all_nowait()

    def attach(self, loop: asyncio.AbstractEventLoop, handler: Callable[[M], None]) -> None:
        """Call `handler` in `loop` for each message, in order."""
        self._loop, self._handler = loop, handler
        loop.add_reader(self.fd, self._drain)
        loop.call_soon(self._drain)  # the descriptor does not signal what arrived before

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.fd)
            self._loop = None
        self.socket.close(0)

    def _has_frame(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _append(self, frame: bytes, messages: list[M]) -> None:
        try:
            messages.append(self._decode(frame))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            self.rejected += 1
            log.error("dropped a message that is not of this worker's protocol: %s", e)

    def _drain(self) -> None:
        if self._loop is None or self._handler is None:
            return
        messages = self.recv_all_nowait(RECV_BURST)
        for message in messages:
            self._handle(message)
        if len(messages) == RECV_BURST:
            self._loop.call_soon(self._drain)

    def _handle(self, message: M) -> None:
        assert self._handler is not None
        try:
            self._handler(message)
        except Exception:
            log.exception("handler failed for %s", type(message).__name__)


class PushSocket:
    """Sends structs to the process that binds `endpoint`, now or later."""

    def __init__(self, endpoint: str, *, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.socket.connect(endpoint)
        self._endpoint = endpoint
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message. Raises `PeerStalled` when the queue is full."""
        try:
            self.socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerStalled(f"{os.path.basename(self._endpoint)} takes no messages") from None

    def close(self) -> None:
        self.socket.close()
