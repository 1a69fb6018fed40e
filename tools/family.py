"""A process and all that came from it: its descendants, and what a fork server forked for any of them."""

import contextlib

import psutil

from service.process.fork_server import STARTED_BY


def children(pid: int) -> list[psutil.Process]:
    """The processes that `pid` has started, itself or through a fork server."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [*psutil.Process(pid).children(), *forked_for({pid})]
    return []


def family(pid: int) -> list[psutil.Process]:
    """It first; [] if it is gone."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        found = [leader, *leader.children(recursive=True)]
    while more := [process for process in forked_for({p.pid for p in found}) if process not in found]:
        found += more
    return found


def lives(process: psutil.Process) -> bool:
    """Whether it still runs: a zombie has ended, and a process may end between two questions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def forked_for(pids: set[int]) -> list[psutil.Process]:
    marks, found = {f"{STARTED_BY}{pid}" for pid in pids}, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if not marks.isdisjoint(process.cmdline()[:5]):
                found.append(process)
    return found
