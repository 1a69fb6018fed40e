"""Child processes, started or forked."""

import hashlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

# ---- Messages between a fork server and its clients.

# ADDRESS/DIGEST of the fork servers for schedulers and for HTTP processes.
SERVER_VARIABLE, HTTP_SERVER_VARIABLE = "TANDEM_FORK_SERVER", "TANDEM_HTTP_FORK_SERVER"
# Variables that no import reads. In all others server and child must agree.
_READ_LATER = frozenset(
    {
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),  # the engine sets its threads by torch.set_num_threads
        "PYTHONUNBUFFERED",  # a forked child is line-buffered
        *("TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "TMPDIR"),
        *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"),
    }
)
_READ_LATER_PREFIXES = ("TANDEM_", "CUDA_MPS_", "OTEL_", "PYTEST_")  # OTEL_: imported on use
_OPENMP = ("OMP_", "GOMP_")  # read by compute libraries
LONGEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 250  # the kernel takes 253 at once
_CREDENTIALS = struct.Struct("3i")


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A child to fork: `main(argv)` of `module` returns its exit status.

    `group`: to join, 0 for a new one. `descriptors`: numbers for the sent ones. `client`: its pid.
    `exits_hard`: without waiting for threads.
    """

    module: str
    argv: list[str]
    env: dict[str, str]
    folder: str
    group: int
    descriptors: list[int]
    client: int
    ignored: list[int]
    exits_hard: bool


class ForkReply(msgspec.Struct, frozen=True, kw_only=True):
    """First `pid`, with a pidfd; at the end `status`, as `subprocess.Popen.returncode`."""

    pid: int | None = None
    status: int | None = None


def digest_of(env: Mapping[str, str], *, variable: str = SERVER_VARIABLE) -> str:
    """Hash the variables that imports may have read."""
    later = (*_READ_LATER_PREFIXES, *(_OPENMP if variable == HTTP_SERVER_VARIABLE else ()))
    read = {n: v for n, v in env.items() if n not in _READ_LATER and not n.startswith(later)}
    return hashlib.sha256(msgspec.json.encode(sorted(read.items()))).hexdigest()[:16]


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer is this user's: abstract addresses have no owner."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Message and descriptors, empty at the end. May raise BlockingIOError."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, LONGEST_BYTES, MAX_DESCRIPTORS)
    except ConnectionError:
        return b"", []
    return data, descriptors


# ---- child process

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
        """A new descriptor, readable when `poll` may have changed."""
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
    """The fork server's address in `env`, if it fits."""
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
