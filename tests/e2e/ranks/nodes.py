"""Workers whose ranks are on several machines: network namespaces, or where those cannot be several addresses of this one."""

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.cluster import end_tree, wait_ready
from tests.e2e.ranks.leaders import Leader, start_process
from tools.faults.machines import Machines

FLAGS = ("--model-path", "recall-wide", "--max-total-tokens", "16384", "--log-level", "warning", "--port", "0")
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")  # processes elsewhere say nothing here


@dataclass
class Part:
    """One `tandem serve` or `tandem router`."""

    process: Leader
    ready: Path
    log: Path

    def wait(self) -> dict[str, Any]:
        """Return what its ready file says."""
        return wait_ready(self.ready, self.process, self.log)

    def errors(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "error:" in line]


class Fleet:
    """Starts parts on machines; ends them with the block. `machines`: None where there are none."""

    def __init__(self, folder: Path, machines: Machines | None, stack: ExitStack) -> None:
        self._folder = folder
        self.machines = machines
        self._stack = stack
        self.secret = folder / "secret"
        self.secret.write_text("sixteen bytes or more")
        self.secret.chmod(0o600)

    def host(self, name: str) -> str:
        return "127.0.0.1" if self.machines is None else self.machines.address[name]

    def start(self, name: str, *args: str, own_pids: bool = False, env: Mapping[str, str] | None = None) -> Part:
        """`args` of `tandem`. On the machine of that name; "router": on this one."""
        folder = self._folder / name
        folder.mkdir()
        part_folder = folder / "ready.json", folder / "log"
        before: list[str] = []
        if self.machines is not None and name in self.machines.address:
            before = [*self.machines.command_on(name), *(OWN_PIDS if own_pids else ())]
        command = [*before, sys.executable, "-m", "deploy", *args, "--cluster-secret-file", str(self.secret)]
        process = start_process([*command, "--ready-file", str(part_folder[0])], part_folder[1], env)
        self._stack.callback(end_tree, process)
        return Part(process, *part_folder)

    def off_loopback(self, name: str) -> list[str]:
        """Flags of what serves HTTP there."""
        return ["--host", self.host(name), "--allow-insecure"]

    def group(self, leader: str, nnodes: int) -> list[str]:
        """Flags of all nodes of a group whose node 0 is on `leader`."""
        return ["--nnodes", str(nnodes), "--dist-init-addr", f"{self.host(leader)}:{_free_port()}"]


@contextmanager
def fleet(folder: Path, *names: str) -> Iterator[Fleet]:
    with ExitStack() as stack:
        machines = None
        try:
            machines = Machines(names)
            stack.callback(machines.close)
        except (AssertionError, OSError):  # no rights, or no iproute2
            pass
        yield Fleet(folder, machines, stack)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
