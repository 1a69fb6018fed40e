"""Proof that a peer process is dead, so that memory it could write to may be used again.

A closed connection proves nothing: the process may live behind a broken network. Two proofs count:
- same machine and pid namespace: /proc does not list the process (by pid and start time), or it is a zombie;
- elsewhere: its control port, which is bound while its manager lives, refuses connections.
"""

import os
import socket
from enum import Enum
from pathlib import Path

import msgspec

_STATE_FIELD, _START_FIELD = 0, 19  # of /proc/PID/stat after the command name (proc(5): fields 3 and 22)


class Liveness(Enum):
    DEAD = "dead"
    ALIVE = "alive"
    UNKNOWN = "unknown"


class ProcessMark(msgspec.Struct, frozen=True, array_like=True):
    """Names one process, now and later. `host`: boot id and pid namespace, equal where pids mean the same."""

    host: str
    pid: int
    start_ticks: int


UNMARKED = ProcessMark(host="", pid=0, start_ticks=0)  # a process whose mark is unknown: only its port can be probed


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
    if mark.host and mark.host == host_id() and mark.start_ticks:
        stat = _stat(mark.pid)
        alive = stat is not None and stat[0] not in "ZX" and stat[1] == mark.start_ticks
        return Liveness.ALIVE if alive else Liveness.DEAD
    return _probe(control, timeout_s)


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[_STATE_FIELD], int(fields[_START_FIELD])
    except (OSError, IndexError, ValueError):
        return None


def _probe(control: str, timeout_s: float) -> Liveness:
    host, _, port = control.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return Liveness.ALIVE
    except ConnectionRefusedError:
        return Liveness.DEAD
    except (OSError, ValueError):
        return Liveness.UNKNOWN
