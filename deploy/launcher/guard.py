"""The guard: kills the cluster's process groups when the launcher ends, even by kill -9.

A script without site-packages, to start in milliseconds. Stdin gets `+PGID` (watch) and `-PGID`
(reaped); at its end watched groups are killed and their files removed. PR_SET_PDEATHSIG
(service/process/start.py) only reaches direct children.

usage: guard.py PREFIX    paths of PREFIX, a group leader's pid and "-" belong to that group
"""

import contextlib
import glob
import os
import shutil
import signal
import sys
from typing import IO


def watch(lines: IO[str]) -> set[int]:
    """The groups still watched."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if sign == "+" and number.isdigit():
            groups.add(int(number))
        elif sign == "-" and number.isdigit():
            groups.discard(int(number))
    return groups


def clear(group: int, prefix: str) -> None:
    for path in glob.glob(f"{glob.escape(prefix)}{group}-*"):
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    for group in sorted(watch(sys.stdin)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        clear(group, sys.argv[1])


if __name__ == "__main__":
    main()
