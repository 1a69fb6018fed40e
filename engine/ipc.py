"""Unix sockets between processes of a worker, and requests' wire names.

Each socket has one receiver (engine/pull_socket.py), any senders (engine/push_socket.py).
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from service.process.socket_folder import socket_folder

IPC_PREFIX = "tandem-ipc-"
MAIN_FRONTEND = 0  # row of the main frontend


def addressed(rid: str, row: int) -> str:
    """Wire name ("NAME:NUMBER"), marked with its frontend unless main."""
    return f"{rid}@{row}" if row else rid


def row_of(rid: str) -> int:
    mark = rid.rpartition(":")[2].partition("@")[2]
    return int(mark) if mark else MAIN_FRONTEND


@dataclass(frozen=True)
class IpcPaths:
    """Endpoints of one DP rank's scheduler. `dir` has mode 0700 for access control."""

    dir: str
    dp_rank: int = 0

    @classmethod
    def create(cls, parent: str | None = None) -> "IpcPaths":
        """Make a private directory; remove dead owners'.

        Raises ConfigError if the path is too long.
        """
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
