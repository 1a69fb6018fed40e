"""Frames of bytes between processes of one machine, over Unix stream sockets: one reader, several writers, no threads at rest.

Owns the sockets, the framing and what a writer keeps for a reader that is not there yet or is slow. Must not know what a
frame means.

    frame     length, 4 bytes, the machine's order | that many bytes

A message broker's threads (ZMQ's, before) cost two more wake-ups a message and process, which was most of what a step of
few tokens cost outside the engine. Here a message is one `send` and one `recv`; a thread of the writer runs only while
something could not be sent at once.
"""

import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 16  # at a time
LISTEN_BACKLOG = 16
RETRY_S = 0.01  # while the reader is not there
SEND_WAIT_S = 0.2  # after which a writer that waits for a slow reader looks whether it is to end
LINGER_S = 0.5  # what a closing writer may still deliver
HEAD = struct.Struct("=I")


class Full(RuntimeError):
    """The writer keeps as many frames as it may."""


class FrameReader:
    """Binds `path` and takes frames from whoever connects, each writer's in order."""

    def __init__(self, path: str) -> None:
        self.num_dropped = 0  # writers that did not keep to the framing
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with suppress(FileNotFoundError):
            os.unlink(path)  # left by an earlier life of this worker
        self._listener.bind(path)
        self._listener.listen(LISTEN_BACKLOG)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}

    @property
    def fd(self) -> int:
        """Readable while there is something to take; it stays so until it is taken."""
        return self._epoll.fileno()

    def take(self, timeout_s: float = 0) -> list[bytes] | None:
        """The frames that a piece of each writer's bytes completes; None: nothing came in time."""
        ready = self._epoll.poll(timeout_s)
        if not ready:
            return None
        frames: list[bytes] = []
        for fd, _ in ready:
            connection = self._connections.get(fd)
            if connection is None:
                self._accept()
            elif not connection.read_into(frames):
                self.num_dropped += connection.broken
                self._drop(fd)
        return frames

    def close(self) -> None:
        for fd in list(self._connections):
            self._drop(fd)
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            self._connections[accepted.fileno()] = _Connection(accepted)
            self._epoll.register(accepted, select.EPOLLIN)

    def _drop(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self._connections.pop(fd).socket.close()


class _Connection:
    """One writer, as the reader sees it. `broken`: it sent what is no frame."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.broken = False
        self._pieces: list[bytes] = []
        self._size = 0
        self._wanted = HEAD.size  # bytes from which on there is more to find

    def read_into(self, frames: list[bytes]) -> bool:
        """Append the frames that are complete now; False when this was the last."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= self._wanted:
            self._split(frames)
        return bool(data) and not self.broken

    def _split(self, frames: list[bytes]) -> None:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        at, self._wanted = 0, HEAD.size
        while len(data) - at >= HEAD.size:
            (length,) = HEAD.unpack_from(data, at)
            if length > MAX_FRAME_BYTES:
                log.error("a process of this worker announced a message of %d bytes: its connection is dropped", length)
                self.broken = True
                break
            end = at + HEAD.size + length
            if end > len(data):
                self._wanted = end - at
                break
            frames.append(data[at + HEAD.size : end])
            at = end
        self._pieces, self._size = [data[at:]], len(data) - at


class FrameWriter:
    """Sends frames to the reader that binds `path`; it need not be there yet. Keeps `max_kept` frames at most.

    A reader that goes takes what it had not read with it; what follows goes to the next one at the same path.
    """

    def __init__(self, path: str, *, max_kept: int) -> None:
        self._path = path
        self._max_kept = max_kept
        self._socket: socket.socket | None = None
        self._kept: deque[bytes] = deque()  # frames with their heads; of the first, `_sent` bytes are gone
        self._sent = 0
        self._met = False  # a reader was there
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # lives while something is kept

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def send(self, frame: bytes) -> None:
        """Never waits. Raises `Full`."""
        with self._changed:
            if len(self._kept) >= self._max_kept:
                raise Full
            self._kept.append(HEAD.pack(len(frame)) + frame)
            if self._thread is None and not self._push():
                self._thread = threading.Thread(target=self._push_later, name="frame-writer", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Waits a moment for what is kept, unless its reader has gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or self._left, LINGER_S)
            self._closed = True
            self._kept.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._disconnect()

    @property
    def _left(self) -> bool:
        return self._met and self._socket is None

    def _push(self) -> bool:
        """Send what is kept as far as it goes; False: some is left, its reader is slow or not there."""
        while self._kept:
            if self._socket is None and not self._connect():
                return False
            assert self._socket is not None
            frame = self._kept[0]
            try:
                self._sent += self._socket.send(memoryview(frame)[self._sent :] if self._sent else frame)
            except BlockingIOError:
                return False
            except OSError:  # the reader has gone
                self._disconnect()
                return False
            if self._sent == len(frame):
                self._kept.popleft()
                self._sent = 0
        return True

    def _push_later(self) -> None:
        while True:
            self._await_reader()
            with self._changed:
                if self._closed or self._push():
                    self._thread = None
                self._changed.notify_all()
                if self._thread is None:
                    return

    def _await_reader(self) -> None:
        """Until more can be sent, or it is time to look again."""
        if self._socket is None:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, RETRY_S)
            return
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        deadline_s = time.monotonic() + SEND_WAIT_S
        while not self._closed and time.monotonic() < deadline_s and not waiting.poll(20):
            pass

    def _connect(self) -> bool:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            made.connect(self._path)
        except OSError:
            made.close()
            return False
        self._socket, self._met = made, True
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._sent = None, 0
