"""A leader and one follower: whole messages, in order, and an end of file when either process ends.

On one machine a socket pair, on two a TCP connection (stream.py). SOCK_SEQPACKET takes messages of some 200 KiB; longer ones go in parts. Measured on Linux: 35 us for a message and its answer, 0.5 ms
from a SIGKILL to the end of file.
"""

import contextlib
import socket
import threading
from typing import Generic, Protocol, TypeVar

import msgspec

from engine.ranks.ends import ChannelClosed, ChannelFull
from engine.ranks.messages import ToFollower, ToLeader
from engine.ranks.stream import StreamEnd

M = TypeVar("M")

PART_BYTES = 64 << 10
SEND_BUFFER_BYTES = 4 << 20  # asked for; Linux gives at most net.core.wmem_max
MORE, LAST = b"\x01", b"\x00"


class ChannelEnd(Protocol):
    """One end of the connection, for whole messages. Raises ChannelClosed, and `put`, which never blocks, ChannelFull."""

    def fileno(self) -> int: ...

    def put(self, data: bytes) -> None: ...

    def get(self) -> bytes: ...

    def shut(self) -> None: ...

    def close(self) -> None: ...


class Channel(Generic[M]):
    """Sends come from any thread, `receive` from one. `receives`: the type of the messages that arrive."""

    def __init__(self, end: socket.socket, receives: type[M]) -> None:
        self._end: ChannelEnd = StreamEnd(end) if end.type == socket.SOCK_STREAM else _PacketEnd(end)
        self._decoder = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: ToFollower | ToLeader) -> None:
        """Never blocks. Raises ChannelFull and ChannelClosed."""
        self._end.put(msgspec.msgpack.encode(message))

    def receive(self) -> M:
        """Wait for the next message. Raises ChannelClosed."""
        return self._decoder.decode(self._end.get())

    def shut(self) -> None:
        """End it for both sides: a waiting `receive` raises ChannelClosed."""
        self._end.shut()

    def close(self) -> None:
        self._end.close()


class _PacketEnd:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def fileno(self) -> int:
        return self._end.fileno()

    def put(self, data: bytes) -> None:
        with self._lock:
            for at in range(0, len(data), PART_BYTES):
                self._send_part((MORE if at + PART_BYTES < len(data) else LAST) + data[at : at + PART_BYTES])

    def _send_part(self, part: bytes) -> None:
        try:
            self._end.send(part, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise ChannelFull("its messages pile up") from None
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def get(self) -> bytes:
        parts = []
        while True:
            try:
                part = self._end.recv(PART_BYTES + 1)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not part:
                raise ChannelClosed("end of file")
            parts.append(part[1:])
            if part[:1] == LAST:
                return b"".join(parts)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """The leader's end, and the end that its follower inherits."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def leader_end(end: socket.socket) -> Channel[ToLeader]:
    return Channel(end, ToLeader)  # type: ignore[arg-type]


def follower_end(descriptor: int) -> Channel[ToFollower]:
    return Channel(socket.socket(fileno=descriptor), ToFollower)  # type: ignore[arg-type]
