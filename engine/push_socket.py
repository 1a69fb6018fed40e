"""The sender of messages to another process of the worker (engine/pull_socket.py). One msgspec struct is one message.

What the receiver does not take at once waits here; a thread that lives as long as something waits sends it.
"""

import os
import socket
import threading
import time
from collections import deque

import msgspec

from service.process.message_stream import ChannelClosed, ChannelFull, MessageStream

MAX_QUEUED_BYTES = 256 << 20  # a receiver this far behind is stuck
LINGER_S = 0.5  # that a closing sender waits for its receiver
FIRST_RETRY_S, LONGEST_RETRY_S = 0.01, 0.2  # while no receiver is there


class PeerStalled(RuntimeError):
    """The receiver is dead or far behind: too much waits for it."""


class PushSocket:
    """Sends to the process that binds `endpoint`, now or later: it connects with the first message. One thread sends."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        self._stream: MessageStream | None = None
        self._early: deque[bytes] = deque()  # while no receiver is there
        self._num_early_bytes = 0
        self._retry: threading.Thread | None = None
        self._closed = threading.Event()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, now or soon. Raises `PeerStalled`."""
        data = self._encode(message)
        try:
            with self._lock:
                if self._early or not self._put(data):
                    self._wait_with(data)
        except ChannelFull:
            raise PeerStalled(f"{os.path.basename(self._endpoint)} takes no messages") from None

    def close(self) -> None:
        """Wait LINGER_S at most until the receiver has all."""
        until_s = time.monotonic() + LINGER_S
        if (retry := self._retry) is not None:
            retry.join(LINGER_S)
            self._closed.set()
            retry.join()
        if self._stream is not None:
            self._stream.flush(max(0.0, until_s - time.monotonic()))
            self._stream.close()

    def _put(self, data: bytes) -> bool:
        """Whether a receiver is there."""
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
    """Raises ChannelClosed: no process receives there."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(endpoint)
    except OSError as error:
        connection.close()
        raise ChannelClosed(str(error)) from None
    return MessageStream(connection, most_unsent_bytes=MAX_QUEUED_BYTES)
