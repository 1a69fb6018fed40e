"""Fork server of a local cluster's router and frontends. Never imports torch."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deploy.launcher.fork_servers import fork_server
from service.process.fork_messages import HTTP_SERVER_VARIABLE

MODULES = ("deploy.cli", "deploy.commands.serve", "disagg.worker", "deploy.commands.router", "router.server")


@contextlib.contextmanager
def http_fork_server(*, count: int, log_dir: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of `count` processes; {} for one, or below another fork server."""
    if count == 1 or HTTP_SERVER_VARIABLE in os.environ:
        yield {}
        return
    log = (log_dir / "http-fork-server.log").open("wb")
    with log, fork_server(MODULES, env=os.environ, log=log, variable=HTTP_SERVER_VARIABLE) as server:
        yield server
