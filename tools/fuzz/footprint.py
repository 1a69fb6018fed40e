"""What processes hold, counted before and after: a leak of files, threads or memory is a difference. And the end of a hang.

Memory is compared once a tenth of the inputs have warmed everything up; what has no end grows on.
"""

import faulthandler
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

SETTLE_S, HANG_S = 30.0, 120.0


def note_life() -> None:
    """An input is begun, or one under way moves. Without that the process ends with the stacks of all threads: it could say no more."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)


class Leak(AssertionError):
    """Something was held that should have been given back."""


@dataclass(frozen=True)
class Footprint:
    """Of one process. `num_fds` counts files, pipes and sockets of every kind; memory in MiB."""

    num_fds: int
    num_threads: int
    memory_mib: float


def footprint(process: psutil.Process) -> Footprint:
    with process.oneshot():
        return Footprint(process.num_fds(), process.num_threads(), process.memory_info().rss / 2**20)


def assert_no_leak(
    process: psutil.Process, warm: Footprint, *, growth_mib: float, slack: int = 0, name: str
) -> Footprint:
    """Raises `Leak`; files and threads are given time to go. `slack`: of them, that keep-alive connections explain."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        now = footprint(process)
        more = (now.num_fds - warm.num_fds, now.num_threads - warm.num_threads)
        if max(more) <= slack:
            break
        if time.monotonic() > deadline_s:
            raise Leak(f"{name}: {more[0]:+d} open files, {more[1]:+d} threads")
        time.sleep(0.05)
    grown = now.memory_mib - warm.memory_mib
    if grown > growth_mib:
        raise Leak(f"{name}: memory has grown by {grown:.0f} MiB, at most {growth_mib:.0f} are allowed")
    return now


def told(warm: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> str:
    """One line for the report, of processes by name; those whose memory moved by a MiB or more are named."""
    fds = sum(after[name].num_fds - warm[name].num_fds for name in warm)
    threads = sum(after[name].num_threads - warm[name].num_threads for name in warm)
    grown = {name: after[name].memory_mib - warm[name].memory_mib for name in warm}
    moved = ", ".join(f"{name} {mib:+.1f}" for name, mib in grown.items() if abs(mib) >= 1.0)
    return f"open files {fds:+d}, threads {threads:+d}, memory (MiB) {moved or 'within 1'}"
