"""Starts fork servers (service/process/fork_server.py)."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from deploy.launcher.plan import ProcessSpec
from disagg.processes.children import PRELOADED, openmp_env
from engine.device.gpus import VISIBLE
from engine.flags.local_defaults import default_threads
from service.process.child_process import HTTP_SERVER_VARIABLE, SERVER_VARIABLE, digest_of, new_socket
from service.process.start import ROOM_BYTES, die_with_parent
from service.process.stop_signals import TO_GROUPS
from service.waiter import usable_cores

BACKLOG = 256
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # OpenBLAS starts threads at import, which a fork would lose


@contextlib.contextmanager
def fork_server(
    modules: Sequence[str], *, env: Mapping[str, str], log: BinaryIO | None = None, variable: str = SERVER_VARIABLE
) -> Iterator[dict[str, str]]:
    """Yield its clients' environment.

    Server and children end with the context. `variable` names its kind.
    """
    address = f"tandem-fork-{os.getpid()}-{secrets.token_hex(8)}"
    with new_socket() as listener:
        listener.bind(f"\0{address}")
        listener.listen(BACKLOG)
        descriptor = str(listener.fileno())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "service.process.fork_server", descriptor, "-" * ROOM_BYTES, *modules],
            env={**env, **ONE_THREAD},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            pass_fds=(listener.fileno(),),
            process_group=0,
            preexec_fn=die_with_parent(ignored=TO_GROUPS),  # ended by its parent
        )
    try:
        yield {variable: f"{address}/{digest_of(env, variable=variable)}"}
    finally:
        process.kill()
        process.wait()


# ---- Fork server of a local cluster's schedulers and ranks, which imports torch once.


@contextlib.contextmanager
def engine_server(
    specs: Sequence[ProcessSpec], *, model: str, threads: int | None, log_dir: Path
) -> Iterator[dict[str, str]]:
    """Yield the environment of forked engines; {} on GPUs or below another fork server.

    A worker with another environment starts anew.
    """
    worker = next(spec for spec in specs if spec.ranks)
    if SERVER_VARIABLE in os.environ or VISIBLE in worker.env:
        yield {}
        return
    given = {**os.environ, **worker.env}
    threads = threads or default_threads(model, cores=max(1, usable_cores() // worker.ranks))
    env = {**given, **openmp_env(threads, given, shares_cores=False)}
    with (log_dir / "fork-server.log").open("wb") as log, fork_server(PRELOADED, env=env, log=log) as server:
        yield server


# ---- Fork server of a local cluster's router and frontends. Never imports torch.

HTTP_MODULES = (
    "deploy.cli",
    "deploy.commands.serve",
    "disagg.processes.worker",
    "deploy.commands.router",
    "router.server",
)


@contextlib.contextmanager
def http_fork_server(*, count: int, log_dir: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of `count` processes; {} for one, or below another fork server."""
    if count == 1 or HTTP_SERVER_VARIABLE in os.environ:
        yield {}
        return
    log = (log_dir / "http-fork-server.log").open("wb")
    with log, fork_server(HTTP_MODULES, env=os.environ, log=log, variable=HTTP_SERVER_VARIABLE) as server:
        yield server
