"""Unix sockets between processes of a worker, with one receiver each, and requests' wire names."""

import asyncio
import logging
import os
import select
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from service.process.files import socket_folder
from service.process.message_stream import LENGTH, ChannelClosed, ChannelFull, MessageStream

IPC_PREFIX = "tandem-ipc-"
MAIN_FRONTEND = 0  # row of the main frontend


def addressed(rid: str, row: int) -> str:
    """Wire name ("NAME:NUMBER"), marked with its frontend unless main."""
    return f"{rid}@{row}" if row else rid


def row_of(rid: str) -> int:
    mark = rid.rpartition(":")[2].partition("@")[2]
    return int(mark) if mark else MAIN_FRONTEND


@dataclass(frozen=True)
class IpcPaths:
    """Endpoints of one DP rank's scheduler. `dir` has mode 0700 for access control."""

    dir: str
    dp_rank: int = 0

    @classmethod
    def create(cls, parent: str | None = None) -> "IpcPaths":
        """Make a private directory; remove dead owners'.

        Raises ConfigError if the path is too long.
        """
        folder = Path(parent or socket_folder())
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
        return f"{self.dir}/{name}{f'.{self.dp_rank}' if self.dp_rank else ''}"

    def http_socket(self, row: int) -> Path:
        return Path(self.dir, f"http{row}")

    @property
    def frontend_spec(self) -> Path:
        return Path(self.dir, "frontend.json")

    @property
    def reported_error(self) -> Path:
        """The line of a child that could not start."""
        return Path(self.dir, "error")

    def remove(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)


def _is_orphan(folder: Path) -> bool:
    pid = folder.name.removeprefix(IPC_PREFIX).partition("-")[0]
    try:
        mine = folder.stat().st_uid == os.getuid()
    except OSError:
        return False
    return mine and pid.isdigit() and not Path(f"/proc/{pid}").exists()


M = TypeVar("M")

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
READ_BYTES = 64 << 10  # per turn of an event loop
BACKLOG = 128


class PullSocket(Generic[M]):
    """Receives `union` from all senders. Undecodable messages are logged and counted.

    Without a thread: a message wakes its handler's thread and takes one system call.
    """

    def __init__(self, endpoint: str, union: Any, *, join: Callable[[list[M]], list[M]] = list) -> None:
        """`join`: several messages that a handler finds become fewer."""
        Path(endpoint).unlink(missing_ok=True)  # of an ended process
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(endpoint)
        self._listener.listen(BACKLOG)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self.fd = self._poll.fileno()  # readable once something has arrived
        self._senders: dict[int, _Sender] = {}
        self.rejected = 0
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[M], None] | None = None
        self._join = join

    def recv_all_nowait(self) -> list[M]:
        return self._take(timeout_s=0.0, reads_all=True)

    def recv(self, timeout_s: float) -> list[M]:
        """Wait up to `timeout_s`, then take all messages."""
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            messages = self._take(timeout_s=max(0.0, left_s), reads_all=True)
            if messages or left_s <= 0:
                return messages

    def attach(self, loop: asyncio.AbstractEventLoop, handler: Callable[[M], None]) -> None:
        self._loop, self._handler = loop, handler
        loop.add_reader(self.fd, self._drain)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.fd)
            self._loop = None
        for sender in self._senders.values():
            sender.connection.close()
        self._listener.close()
        self._poll.close()

    def _take(self, *, timeout_s: float, reads_all: bool) -> list[M]:
        messages: list[M] = []
        for descriptor, _ in self._poll.poll(timeout_s):
            sender = self._senders.get(descriptor) or self._accept()
            if sender is not None:
                self._read(sender, messages, reads_all=reads_all)
        return messages

    def _accept(self) -> "_Sender | None":
        with suppress(OSError):  # it may be gone
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._poll.register(connection, select.EPOLLIN)
            sender = self._senders[connection.fileno()] = _Sender(connection)
            return sender
        return None

    def _read(self, sender: "_Sender", messages: list[M], *, reads_all: bool) -> None:
        try:
            while True:
                frames, has_more = sender.read()
                for frame in frames:
                    self._append(frame, messages)
                if not (has_more and reads_all):
                    return
        except ChannelClosed as end:
            if end.args:
                log.error("a sender of this worker is cut off: %s", end)
            del self._senders[sender.connection.fileno()]
            self._poll.unregister(sender.connection)
            sender.connection.close()

    def _append(self, frame: bytes, messages: list[M]) -> None:
        try:
            messages.append(self._decode(frame))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            self.rejected += 1
            log.error("dropped a message that is not of this worker's protocol: %s", e)

    def _drain(self) -> None:
        if self._handler is None:
            return
        messages = self._take(timeout_s=0.0, reads_all=False)
        for message in messages if len(messages) < 2 else self._join(messages):
            self._handle(message)

    def _handle(self, message: M) -> None:
        assert self._handler is not None
        try:
            self._handler(message)
        except Exception:
            log.exception("handler failed for %s", type(message).__name__)


class _Sender:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._begun = bytearray()  # an incomplete message

    def read(self) -> tuple[list[bytes], bool]:
        """Complete messages and whether more may follow. Raises ChannelClosed."""
        try:
            came = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return [], False
        except OSError:
            raise ChannelClosed from None
        if not came:
            raise ChannelClosed
        return self._whole(came), len(came) == READ_BYTES

    def _whole(self, came: bytes) -> list[bytes]:
        data: bytes | bytearray = came
        if self._begun:
            self._begun += came
            data = self._begun
        messages, at = [], 0
        while (begin := at + LENGTH.size) <= len(data):
            (length,) = LENGTH.unpack_from(data, at)
            if length > MAX_MESSAGE_BYTES:
                raise ChannelClosed(f"it announces a message of {length} bytes")
            if begin + length > len(data):
                break
            messages.append(bytes(data[begin : begin + length]))
            at = begin + length
        if at or data is came:
            self._begun = bytearray(data[at:])
        return messages


MAX_QUEUED_BYTES = 256 << 20  # beyond it the receiver is stuck
LINGER_S = 0.5  # for the receiver, on close
FIRST_RETRY_S, LONGEST_RETRY_S = 0.01, 0.2  # without receiver


class PeerStalled(RuntimeError):
    """The receiver is dead or stuck."""


class PushSocket:
    """Connects with the first message. A temporary thread sends what must wait. Single-threaded."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        self._stream: MessageStream | None = None
        self._early: deque[bytes] = deque()  # while there is no receiver
        self._num_early_bytes = 0
        self._retry: threading.Thread | None = None
        self._closed = threading.Event()

    def send(self, message: msgspec.Struct) -> None:
        """Send or queue a message. Raises PeerStalled."""
        data = self._encode(message)
        try:
            with self._lock:
                if self._early or not self._put(data):
                    self._wait_with(data)
        except ChannelFull:
            raise PeerStalled(f"{os.path.basename(self._endpoint)} takes no messages") from None

    def close(self) -> None:
        """Wait at most LINGER_S for the receiver."""
        until_s = time.monotonic() + LINGER_S
        if (retry := self._retry) is not None:
            retry.join(LINGER_S)
            self._closed.set()
            retry.join()
        if self._stream is not None:
            self._stream.flush(max(0.0, until_s - time.monotonic()))
            self._stream.close()

    def _put(self, data: bytes) -> bool:
        try:
            if self._stream is None:
                self._stream = _connected(self._endpoint)
            self._stream.put(data)
        except ChannelClosed:
            if self._stream is not None:
                self._stream.close()
            self._stream = None
            return False
        return True

    def _wait_with(self, data: bytes) -> None:
        if self._num_early_bytes + len(data) > MAX_QUEUED_BYTES:
            raise ChannelFull
        self._early.append(data)
        self._num_early_bytes += len(data)
        if self._retry is None:
            self._retry = threading.Thread(target=self._await_receiver, name="connect", daemon=True)
            self._retry.start()

    def _await_receiver(self) -> None:
        pause_s = FIRST_RETRY_S
        while not self._closed.wait(pause_s):
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            with self._lock:
                while self._early and self._put(self._early[0]):
                    self._num_early_bytes -= len(self._early.popleft())
                if not self._early:
                    self._retry = None
                    return


def _connected(endpoint: str) -> MessageStream:
    """Raises ChannelClosed without receiver."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(endpoint)
    except OSError as error:
        connection.close()
        raise ChannelClosed(str(error)) from None
    return MessageStream(connection, max_unsent_bytes=MAX_QUEUED_BYTES)
