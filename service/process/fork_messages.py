"""What a fork server and its clients say to each other, over a socket that keeps messages apart."""

import hashlib
import os
import socket
import struct
from collections.abc import Mapping

import msgspec

# ADDRESS/DIGEST of a server from which processes that compute may be forked; of one from which those of HTTP may be.
SERVER_VARIABLE, HTTP_SERVER_VARIABLE = "TANDEM_FORK_SERVER", "TANDEM_HTTP_FORK_SERVER"
# Variables that nothing reads while it is imported. In all others the server must be as the child is to be.
_READ_LATER = frozenset(
    {
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),  # the engine sets its threads itself (torch.set_num_threads)
        "PYTHONUNBUFFERED",  # a forked child's lines are never held back
        *(
            "TOKENIZERS_PARALLELISM",
            "CUDA_VISIBLE_DEVICES",
            "TMPDIR",
            "PWD",
            "OLDPWD",
            "SHLVL",
            "_",
            "COLUMNS",
            "LINES",
        ),
    }
)
_READ_LATER_PREFIXES = ("TANDEM_", "CUDA_MPS_", "OTEL_", "PYTEST_")  # OTEL_: its library is imported where spans go out
_OPENMP = ("OMP_", "GOMP_")  # read by what computes
LONGEST_BYTES = 1 << 20
MOST_DESCRIPTORS = 250  # the kernel takes 253 at once
_CREDENTIALS = struct.Struct("3i")


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`module`: has `main(argv)`, which returns the exit status. `env`: all of it. `group`: the process group to join.

    `group`: 0 is a new one. `descriptors`: the numbers that the message's descriptors get. `client`: its process. `ignored`: signals
    that it ignores. `exits_hard`: it ends without waiting for threads, as libraries leave some that never end.
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
    """First `pid`, in a message that brings a pidfd; once the child has ended `status`, as `subprocess.Popen.returncode`."""

    pid: int | None = None
    status: int | None = None


def digest_of(env: Mapping[str, str], *, variable: str = SERVER_VARIABLE) -> str:
    """Of what a library may have read of the environment while it was imported. `variable`: of the kind of server."""
    later = (*_READ_LATER_PREFIXES, *(_OPENMP if variable == HTTP_SERVER_VARIABLE else ()))
    read = {n: v for n, v in env.items() if n not in _READ_LATER and not n.startswith(later)}
    return hashlib.sha256(msgspec.json.encode(sorted(read.items()))).hexdigest()[:16]


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user: an abstract address has no owner."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors; (b"", []) at the end of file. Raises BlockingIOError, if the socket never blocks."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, LONGEST_BYTES, MOST_DESCRIPTORS)
    except ConnectionError:
        return b"", []
    return data, descriptors
