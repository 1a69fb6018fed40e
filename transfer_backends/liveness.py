"""Proof that a peer process is dead, before memory it could write is reused.

A closed connection proves nothing. Proofs:

- same machine and pid namespace: /proc lacks the process (pid and start time), or has a zombie;
- elsewhere: a port that is bound while the process lives refuses connections.
"""

import os
import socket
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec

_STATE_FIELD, _START_FIELD = 0, 19  # of /proc/PID/stat after the command name (proc(5): fields 3 and 22)


class Liveness(Enum):
    DEAD = "dead"
    ALIVE = "alive"
    UNKNOWN = "unknown"


class ProcessMark(msgspec.Struct, frozen=True, array_like=True):
    """`host`: boot id and pid namespace.

    `port` stays bound while the process can write (0: control port).
    """

    host: str
    pid: int
    start_ticks: int
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    address: Annotated[str, msgspec.Meta(max_length=255)] = ""


UNMARKED = ProcessMark(host="", pid=0, start_ticks=0)  # mark unknown: only its port can be probed
GONE = ProcessMark(host="", pid=-1, start_ticks=0)  # proved dead


def bound(host: str) -> socket.socket:
    """A free port stays bound. Raises OSError."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def host_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def own_mark() -> ProcessMark:
    pid = os.getpid()
    stat = _stat(pid)
    return ProcessMark(host=host_id(), pid=pid, start_ticks=stat[1] if stat else 0)


def liveness(mark: ProcessMark, control: str, *, timeout_s: float = 1.0) -> Liveness:
    if mark == GONE:
        return Liveness.DEAD
    if mark.host and mark.host == host_id() and mark.start_ticks:
        stat = _stat(mark.pid)
        alive = stat is not None and stat[0] not in "ZX" and stat[1] == mark.start_ticks
        return Liveness.ALIVE if alive else Liveness.DEAD
    host, _, port = control.rpartition(":")
    return _probe(mark.address or host, str(mark.port or port), timeout_s)


def are_apart(marks: Sequence[ProcessMark], control: str) -> bool:
    """A worker's processes have several addresses."""
    host = control.rpartition(":")[0].strip("[]")
    return any(mark.address.strip("[]") not in ("", host) for mark in marks)


def of_worker(ranks: Sequence[Liveness]) -> Liveness:
    """DEAD if all processes are, ALIVE if the first is; else UNKNOWN, since it may write."""
    if ranks[0] is Liveness.ALIVE:
        return Liveness.ALIVE
    return Liveness.DEAD if all(rank is Liveness.DEAD for rank in ranks) else Liveness.UNKNOWN


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[_STATE_FIELD], int(fields[_START_FIELD])
    except (OSError, IndexError, ValueError):
        return None


def _probe(host: str, port: str, timeout_s: float) -> Liveness:
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return Liveness.ALIVE
    except ConnectionRefusedError:
        return Liveness.DEAD
    except (OSError, ValueError):
        return Liveness.UNKNOWN
