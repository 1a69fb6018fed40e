"""Length-prefixed messages over a socket pair or TCP.

End of file: the peer has ended. Up to `MAX_UNSENT_BYTES` wait for a temporary sender.
"""

import contextlib
import select
import socket
import struct
import threading

LENGTH = struct.Struct("<I")
MAX_UNSENT_BYTES = 4 << 20
LONGEST_BYTES = 256 << 20
SEND_BUFFER_BYTES = 4 << 20  # requested for a pair; Linux caps it at net.core.wmem_max


class ChannelClosed(Exception):
    """The peer has ended or will."""


class ChannelFull(Exception):
    """The peer does not read."""


class MessageStream:
    """One end, which owns the socket. `put` is thread-safe, `get` and `arrived` are not.

    Nothing is read ahead.
    """

    def __init__(self, connection: socket.socket, *, max_unsent_bytes: int | None = None) -> None:
        connection.setblocking(True)
        if connection.family == socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._max_unsent_bytes = MAX_UNSENT_BYTES if max_unsent_bytes is None else max_unsent_bytes
        self._sender: threading.Thread | None = None  # of waiting messages
        self._broken = ""  # cause of an early end
        self._expect_length()

    def fileno(self) -> int:
        return self._connection.fileno()

    def put(self, data: bytes) -> None:
        """Send without blocking. Raises ChannelFull, ChannelClosed."""
        message = LENGTH.pack(len(data)) + data
        with self._lock:
            if self._broken:
                raise ChannelClosed(self._broken)
            if self._unsent:
                if len(self._unsent) + len(message) > self._max_unsent_bytes:
                    raise ChannelFull("its messages pile up")
                self._unsent += message
                return
            self._unsent += message[self._send(message) :]
            if self._unsent:
                self._sender = threading.Thread(target=self._send_rest, name="unsent", daemon=True)
                self._sender.start()

    def flush(self, within_s: float) -> None:
        if self._sender is not None:
            self._sender.join(within_s)

    def get(self, *, within_s: float | None = None) -> bytes:
        """Wait for a message. ChannelClosed at the end, or if it stalls for `within_s`."""
        if within_s is not None:
            self._connection.settimeout(within_s)
        try:
            while (message := self._read(0)) is None:
                pass
            return message
        finally:
            if within_s is not None:
                self._connection.settimeout(None)

    def arrived(self) -> list[bytes]:
        """Complete messages. ChannelClosed after the last."""
        messages: list[bytes] = []
        try:
            while (message := self._read(socket.MSG_DONTWAIT)) is not None:
                messages.append(message)
        except ChannelClosed:
            if not messages:
                raise
        return messages

    def shut(self) -> None:
        """End both sides, also a waiting `get`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    # ---- inside

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
        except (ChannelClosed, OSError, ValueError) as error:
            # The receiver or the next `put` reports it.
            self._broken = str(error) or "closed"

    def _expect_length(self) -> None:
        self._expect(LENGTH.size)
        self._is_length = True

    def _expect(self, size: int) -> None:
        self._part = bytearray(size)
        self._left = memoryview(self._part)
        self._is_length = False

    def _read(self, flags: int) -> bytes | None:
        while True:
            while self._left:
                try:
                    came = self._connection.recv_into(self._left, 0, flags)
                except BlockingIOError:
                    return None
                except OSError as error:
                    raise ChannelClosed(str(error)) from None
                if not came:
                    raise ChannelClosed("end of file")
                self._left = self._left[came:]
            if not self._is_length:
                message = bytes(self._part)
                self._expect_length()
                return message
            (length,) = LENGTH.unpack(self._part)
            if length > LONGEST_BYTES:
                raise ChannelClosed(f"a message of {length} bytes")
            self._expect(length)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
