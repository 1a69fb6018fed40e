"""The guard: a small process that kills the cluster's process groups when the launcher ends, for any reason.

Run as a script (standard library only, no site-packages, so it starts in milliseconds). The launcher holds the other
end of its stdin and writes one line per change: `+PGID` (watch) and `-PGID` (ended and reaped). End of input means that
the launcher has ended, also by kill -9: the guard kills the groups that are still watched and removes their files.
PR_SET_PDEATHSIG (service/process/start.py) ends the direct children as well; only the guard reaches their
children and files.

usage: guard.py PREFIX    paths that begin with PREFIX, the process id of a group's leader and "-" belong to that group
"""

import contextlib
import glob
import os
import shutil
import signal
import sys
from typing import IO


def watch(lines: IO[str]) -> set[int]:
    """Read `lines` to their end; return the process groups that are still watched."""
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
