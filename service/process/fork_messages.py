"""Messages between a fork server and its clients."""

import hashlib
import os
import socket
import struct
from collections.abc import Mapping

import msgspec

# ADDRESS/DIGEST of the fork servers for schedulers and for HTTP processes.
SERVER_VARIABLE, HTTP_SERVER_VARIABLE = "TANDEM_FORK_SERVER", "TANDEM_HTTP_FORK_SERVER"
# Variables that no import reads. In all others server and child must agree.
_READ_LATER = frozenset(
    {
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),  # the engine sets its threads by torch.set_num_threads
        "PYTHONUNBUFFERED",  # a forked child is line-buffered
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
_READ_LATER_PREFIXES = ("TANDEM_", "CUDA_MPS_", "OTEL_", "PYTEST_")  # OTEL_: imported on use
_OPENMP = ("OMP_", "GOMP_")  # read by compute libraries
LONGEST_BYTES = 1 << 20
MOST_DESCRIPTORS = 250  # the kernel takes 253 at once
_CREDENTIALS = struct.Struct("3i")


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A child to fork: `main(argv)` of `module` returns its exit status.

    `group`: to join, 0 for a new one. `descriptors`: numbers for the sent ones. `client`: its pid.
    `exits_hard`: without waiting for threads, as some never end.
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
    """The server's answers: first `pid`, with a pidfd; at the end `status`, as
    `subprocess.Popen.returncode`.
    """

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
    """Return whether the peer is this user's, as abstract addresses have no owner."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return message and descriptors, empty at the end. May raise BlockingIOError."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, LONGEST_BYTES, MOST_DESCRIPTORS)
    except ConnectionError:
        return b"", []
    return data, descriptors
