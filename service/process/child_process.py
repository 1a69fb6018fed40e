"""Child processes, started or forked."""

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from service.process.fork_messages import (
    SERVER_VARIABLE,
    ForkReply,
    ForkRequest,
    digest_of,
    is_own_user,
    new_socket,
    receive,
)

POLL_S = 0.01


class ChildProcess(Protocol):
    """The interface of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A fork server's child, which ends with this process. Thread-safe.

    Only `pid` and `wait` wait for the server's imports.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._status: int | None = None

    @property
    def pid(self) -> int:
        while self.poll() is None and self._pid is None:
            time.sleep(POLL_S)
        return self._pid or 0

    def poll(self) -> int | None:
        with self._lock, suppress(BlockingIOError):
            while self._status is None:
                self._hear()
        return self._status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is not None:
            return
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, sig)
            elif self._status is None:
                self._end(-sig)  # the server still imports, and forks nothing for a closed client

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def news(self) -> int:
        """Return a new descriptor, readable when `poll` may have changed."""
        return os.dup(self._connection.fileno())

    def _hear(self) -> None:
        data, descriptors = receive(self._connection)
        reply = msgspec.json.decode(data, type=ForkReply) if data else ForkReply(status=-signal.SIGKILL)
        if reply.pid is not None:
            self._pid, (self._pidfd,) = reply.pid, descriptors
        if reply.status is not None:
            self._end(reply.status)

    def _end(self, status: int) -> None:
        self._status = status
        self._connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def server_in(env: Mapping[str, str], variable: str = SERVER_VARIABLE) -> str | None:
    """Return the fork server's address in `env`, if it fits."""
    address, _, digest = env.get(variable, "").rpartition("/")
    return address if address and digest == digest_of(env, variable=variable) else None


def forked(
    server: str,
    module: str,
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    descriptors: Sequence[int] = (),
    output: int | None = None,
    own_group: bool = False,
    ignored: Sequence[int] = (),
    exits_hard: bool = True,
) -> ForkedProcess | None:
    """Fork `python -m module args`; None if the server has ended.

    The child has the caller's directory, output (or `output`), `descriptors` by number, and process
    group (or its own). See ForkRequest.
    """
    request = ForkRequest(
        module=module,
        argv=list(args),
        env=dict(env),
        folder=os.getcwd(),
        group=0 if own_group else os.getpgrp(),
        descriptors=list(descriptors),
        client=os.getpid(),
        ignored=list(ignored),
        exits_hard=exits_hard,
    )
    outputs = (1, 2) if output is None else (output, output)
    connection = new_socket()
    try:
        connection.connect(f"\0{server}")
        if is_own_user(connection):
            socket.send_fds(connection, [msgspec.json.encode(request)], [*outputs, *descriptors])
            connection.setblocking(False)
            return ForkedProcess(connection)
    except OSError:  # the server has ended, or the request is too long
        pass
    connection.close()
    return None
