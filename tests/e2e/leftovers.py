"""What processes leave behind when they end, however they end: others of their family, socket directories, shared memory."""

import contextlib
from pathlib import Path

import psutil

from tests.e2e.cluster import wait_until
from tools.family import family, lives


class Leftovers:
    """Of a process and all that came from it, as they are now. `temp`: what they call the temporary directory."""

    def __init__(self, leader_pid: int, temp: Path) -> None:
        self.family = family(leader_pid)
        self._temp = temp
        self._segments: set[Path] = set()
        self.note_segments()

    def note_segments(self) -> None:
        """Remember what of /dev/shm the family has mapped by now; engines make some when they first move bytes."""
        for process in self.family:
            with contextlib.suppress(psutil.Error):
                self._segments |= {Path(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")}

    def left(self) -> list[str]:
        """What is still there of it."""
        pids = {process.pid for process in self.family}
        living = [process for process in self.family if lives(process)]
        folders = [f for f in self._temp.glob("tandem-ipc-*") if int(f.name.split("-")[2]) in pids]
        return [
            *(str(process) for process in living),
            *(str(folder) for folder in folders),
            *(str(segment) for segment in self._segments if segment.exists()),
            *(f"SysV segment of process {pid}" for pid in _sysv_owners() if pid in pids),
        ]

    def assert_gone(self, *, within_s: float) -> None:
        wait_until(lambda: not self.left(), within_s=within_s, what=lambda: f"nothing is left: {self.left()}")


def _sysv_owners() -> list[int]:
    """Who made the SysV segments that exist (proc(5): the fifth column)."""
    return [int(line.split()[4]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
