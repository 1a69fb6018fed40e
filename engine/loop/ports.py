"""The loop's sockets: ZMQ to the other processes of the worker, and a pipe by which threads call for attention."""

import os
from contextlib import suppress

import zmq

from engine.ipc import IpcPaths, PullSocket, PushSocket
from engine.messages import ToFrontend, ToScheduler

EVENTFD_ONE = 1
CLOSED = -1


class ZmqPorts:
    def __init__(self, ipc: IpcPaths) -> None:
        self._inbox: PullSocket[ToScheduler] = PullSocket(ipc.to_scheduler, ToScheduler)
        self._frontend = PushSocket(ipc.to_frontend)
        self._attention = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._attention, zmq.POLLIN)

    def receive(self) -> list[ToScheduler]:
        return self._inbox.recv_all_nowait()

    def wait(self, timeout_s: float) -> None:
        for source, _ in self._poller.poll(int(timeout_s * 1000)):
            if source == self._attention:
                os.eventfd_read(self._attention)

    def call_attention(self) -> None:
        """End the current or next `wait`, from any thread or signal handler, also once closed."""
        if (attention := self._attention) != CLOSED:
            with suppress(OSError):  # closed by the loop's thread since the line above
                os.eventfd_write(attention, EVENTFD_ONE)

    def to_frontend(self, message: ToFrontend) -> None:
        self._frontend.send(message)

    def close(self) -> None:
        for socket in (self._inbox, self._frontend):
            socket.close()
        attention, self._attention = self._attention, CLOSED
        os.close(attention)
