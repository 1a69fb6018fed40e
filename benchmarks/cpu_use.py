"""Says who used this machine's cores for a while: schedulers, what serves beside them, and everybody else. From /proc, by psutil."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

SCHEDULER = ".scheduler_process"  # of its command line, in any tree that is measured


@dataclass(slots=True)
class CpuUse:
    """CPU seconds; `wall_s`: of the clock. `steps_s`: schedulers (steps and transfers); `beside_s`: this process and its other

    descendants (routers, HTTP, the load's own client); `others_s`: everybody else.
    """

    wall_s: float = 0.0
    steps_s: float = 0.0
    beside_s: float = 0.0
    others_s: float = 0.0

    @property
    def cores_left(self) -> float:
        """Cores of the machine that were not taken by others."""
        return (os.cpu_count() or 1) - self.others_s / self.wall_s


@contextmanager
def cpu_use() -> Iterator[CpuUse]:
    """Filled in when the block ends. Processes that start or end within it are not counted as ours."""
    found = CpuUse()
    begin_s, all_s, ours = time.monotonic(), _all_s(), _ours()
    yield found
    found.wall_s = time.monotonic() - begin_s
    for pid, (name, used_s) in _ours().items():
        if pid in ours:
            taken_s = used_s - ours[pid][1]
            found.steps_s += taken_s if SCHEDULER in name else 0.0
            found.beside_s += 0.0 if SCHEDULER in name else taken_s
    found.others_s = max(0.0, _all_s() - all_s - found.steps_s - found.beside_s)


def _all_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _ours() -> dict[int, tuple[str, float]]:
    """By process: command line, CPU seconds of its own (not of its children)."""
    found = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
            found[process.pid] = (" ".join(process.cmdline()), times.user + times.system)
        except psutil.NoSuchProcess:
            continue
    return found
