"""Where the processes of one worker meet: Unix sockets in a private directory, each with one receiver (engine/pull_socket.py) and
any senders (engine/push_socket.py); and whose a request is.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from service.process.socket_folder import socket_folder

IPC_PREFIX = "tandem-ipc-"
MAIN_FRONTEND = 0  # row of the frontend that every worker has


def addressed(rid: str, row: int) -> str:
    """A request's name on the wire ("NAME:NUMBER"), marked with the frontend that answers go to. The main one needs no mark."""
    return f"{rid}@{row}" if row else rid


def row_of(rid: str) -> int:
    """The frontend that sent the request of this name on the wire."""
    mark = rid.rpartition(":")[2].partition("@")[2]
    return int(mark) if mark else MAIN_FRONTEND


@dataclass(frozen=True)
class IpcPaths:
    """Endpoints of one worker, as the scheduler of one of its DP ranks has them. `dir` is 0700: the file system is the
    access control.
    """

    dir: str
    dp_rank: int = 0

    @classmethod
    def create(cls, parent: str | None = None) -> "IpcPaths":
        """Make a private directory; remove those of dead owners. Raises ConfigError where sockets cannot have a path."""
        folder = Path(parent or socket_folder())
        for left in folder.glob(f"{IPC_PREFIX}*"):
            if _is_orphan(left):
                shutil.rmtree(left, ignore_errors=True)
        return cls(tempfile.mkdtemp(prefix=f"{IPC_PREFIX}{os.getpid()}-", dir=folder))

    @property
    def to_scheduler(self) -> str:
        return self._endpoint("scheduler")

    @property
    def to_heartbeat(self) -> str:
        return self._endpoint("heartbeat")

    @property
    def to_frontend(self) -> str:
        return self.to_frontend_of(MAIN_FRONTEND)

    def to_frontend_of(self, row: int) -> str:
        return self._endpoint(addressed("frontend", row))

    def of_ranks(self, dp_size: int) -> "list[IpcPaths]":
        return [IpcPaths(self.dir, rank) for rank in range(dp_size)]

    def _endpoint(self, name: str) -> str:
        return f"{self.dir}/{name}{f'.{self.dp_rank}' if self.dp_rank else ''}"

    def http_socket(self, row: int) -> Path:
        """Return the socket at which a frontend answers the other frontends of its worker."""
        return Path(self.dir, f"http{row}")

    @property
    def frontend_spec(self) -> Path:
        return Path(self.dir, "frontend.json")

    def remove(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)


def _is_orphan(folder: Path) -> bool:
    pid = folder.name.removeprefix(IPC_PREFIX).partition("-")[0]
    try:
        mine = folder.stat().st_uid == os.getuid()
    except OSError:
        return False
    return mine and pid.isdigit() and not Path(f"/proc/{pid}").exists()
