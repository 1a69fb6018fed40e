"""Message sender within a worker (engine/pull_socket.py).

A temporary thread sends what must wait.
"""

import os
import socket
import threading
import time
from collections import deque

import msgspec

from service.process.message_stream import ChannelClosed, ChannelFull, MessageStream

MAX_QUEUED_BYTES = 256 << 20  # beyond it the receiver is stuck
LINGER_S = 0.5  # for the receiver, on close
FIRST_RETRY_S, LONGEST_RETRY_S = 0.01, 0.2  # without receiver


class PeerStalled(RuntimeError):
    """The receiver is dead or stuck."""


class PushSocket:
    """Sends to `endpoint`, connecting with the first message. Single-threaded."""

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
        """Return whether there is a receiver."""
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
    return MessageStream(connection, most_unsent_bytes=MAX_QUEUED_BYTES)
