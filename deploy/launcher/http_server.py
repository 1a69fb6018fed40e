"""The second fork server of a local cluster: router and frontends are forked from one process with what both import. Never torch."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deploy.launcher.fork_servers import fork_server
from service.process.fork_messages import HTTP_SERVER_VARIABLE

MODULES = ("deploy.cli", "deploy.commands.serve", "disagg.worker", "deploy.commands.router", "router.server")


@contextlib.contextmanager
def http_fork_server(*, count: int, log_dir: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of `count` processes to fork; {}: one alone starts as fast anew, or a server above this process serves them."""
    if count == 1 or HTTP_SERVER_VARIABLE in os.environ:
        yield {}
        return
    log = (log_dir / "http-fork-server.log").open("wb")
    with log, fork_server(MODULES, env=os.environ, log=log, variable=HTTP_SERVER_VARIABLE) as server:
        yield server
