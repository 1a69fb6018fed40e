"""Starts fork servers (service/process/fork_server.py)."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from service.process.fork_messages import SERVER_VARIABLE, digest_of, new_socket
from service.process.start import die_with_parent
from service.process.stop_signals import TO_GROUPS
from service.process.title import ROOM_BYTES

BACKLOG = 256
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # OpenBLAS starts threads at import, which a fork would lose


@contextlib.contextmanager
def fork_server(
    modules: Sequence[str], *, env: Mapping[str, str], log: BinaryIO | None = None, variable: str = SERVER_VARIABLE
) -> Iterator[dict[str, str]]:
    """Start a server; yield its clients' environment.

    Server and children end with the context. `variable` names its kind.
    """
    address = f"tandem-fork-{os.getpid()}-{secrets.token_hex(8)}"
    with new_socket() as listener:
        listener.bind(f"\0{address}")
        listener.listen(BACKLOG)
        process = _start(listener.fileno(), modules, env, log)
    try:
        yield {variable: f"{address}/{digest_of(env, variable=variable)}"}
    finally:
        process.kill()
        process.wait()


def _start(
    descriptor: int, modules: Sequence[str], env: Mapping[str, str], log: BinaryIO | None
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "service.process.fork_server", str(descriptor), "-" * ROOM_BYTES, *modules],
        env={**env, **ONE_THREAD},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        pass_fds=(descriptor,),
        process_group=0,
        preexec_fn=die_with_parent(ignored=TO_GROUPS),  # ended by its parent
    )
