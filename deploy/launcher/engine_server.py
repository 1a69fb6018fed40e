"""Fork server of a local cluster's schedulers and ranks, which imports torch once."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.launcher.fork_servers import fork_server
from deploy.launcher.plan import ProcessSpec
from disagg.children import openmp_env
from disagg.preloaded import MODULES
from engine.cores import usable_cores
from engine.device.gpus import VISIBLE
from engine.flags.local_defaults import default_threads
from service.process.fork_messages import SERVER_VARIABLE


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
    with (log_dir / "fork-server.log").open("wb") as log, fork_server(MODULES, env=env, log=log) as server:
        yield server
