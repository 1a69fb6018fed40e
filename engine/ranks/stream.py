"""A channel's end on a TCP connection to another machine: each message after its length.

What the socket does not take at once waits here, up to `MOST_UNSENT_BYTES`, and a thread that lives as long as something waits sends it.
"""

import contextlib
import select
import socket
import struct
import threading

from engine.ranks.ends import ChannelClosed, ChannelFull

LENGTH = struct.Struct("<I")
MOST_UNSENT_BYTES = 4 << 20
LONGEST_BYTES = 256 << 20


class StreamEnd:
    """As `Channel` needs it. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def put(self, data: bytes) -> None:
        message = LENGTH.pack(len(data)) + data
        with self._lock:
            if self._unsent:
                if len(self._unsent) + len(message) > MOST_UNSENT_BYTES:
                    raise ChannelFull("its messages pile up")
                self._unsent += message
                return
            self._unsent += message[self._send(message) :]
            if self._unsent:
                threading.Thread(target=self._send_rest, name="unsent", daemon=True).start()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def _send_rest(self) -> None:
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLOUT)
            while True:
                poll.poll()
                with self._lock:
                    del self._unsent[: self._send(self._unsent)]
                    if not self._unsent:
                        return
        except (ChannelClosed, OSError, ValueError):  # the thread that receives finds the end
            return

    def get(self) -> bytes:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > LONGEST_BYTES:
            raise ChannelClosed(f"a message of {length} bytes")
        return self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                came = self._connection.recv_into(left)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not came:
                raise ChannelClosed("end of file")
            left = left[came:]
        return bytes(data)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
