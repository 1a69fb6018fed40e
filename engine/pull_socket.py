"""Message receiver on a Unix socket within a worker; one msgspec struct per message.

Without a thread: a message wakes its handler's thread and takes one system call.
"""

import asyncio
import logging
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from service.process.message_stream import LENGTH, ChannelClosed

M = TypeVar("M")

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
READ_BYTES = 64 << 10  # per turn of an event loop
BACKLOG = 128


class PullSocket(Generic[M]):
    """Receives `union` from all senders. Undecodable messages are logged and counted."""

    def __init__(self, endpoint: str, union: Any) -> None:
        Path(endpoint).unlink(missing_ok=True)  # of an ended process
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(endpoint)
        self._listener.listen(BACKLOG)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._senders: dict[int, _Sender] = {}
        self.rejected = 0
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[M], None] | None = None

    @property
    def fd(self) -> int:
        """Readable once something has arrived."""
        return self._poll.fileno()

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
        for message in self._take(timeout_s=0.0, reads_all=False):
            self._handle(message)

    def _handle(self, message: M) -> None:
        assert self._handler is not None
        try:
            self._handler(message)
        except Exception:
            log.exception("handler failed for %s", type(message).__name__)


class _Sender:
    """A sender's connection: MessageStream frames, read ahead."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._begun = bytearray()  # an incomplete message

    def read(self) -> tuple[list[bytes], bool]:
        """Return complete messages and whether more may follow. Raises ChannelClosed."""
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
