"""The guard: a tiny process that kills the cluster's process groups when the launcher is gone, however it went.

Run as a script (standard library only, no site-packages, so it starts in milliseconds). The launcher holds the other
end of its stdin and writes one line per change: `+PGID` (watch) and `-PGID` (ended and reaped). End of input means
that the launcher has ended, by kill -9 too: what is still watched is killed. PR_SET_PDEATHSIG on the children (see
process.py) covers the same for the direct children; only the guard reaches their children. A worker that was killed could
not remove its ipc directory: `sweep` does.
"""

import contextlib
import glob
import os
import shutil
import signal
import sys
import tempfile
import time
from typing import IO

IPC_PREFIX = "tandem-ipc-"  # engine.frontend.ipc's, which a script without site-packages cannot import
GONE_S = 2.0  # what a killed process may take to be gone


def watch(lines: IO[str]) -> set[int]:
    """Read `lines` to their end; returns the process groups that were still watched."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if sign == "+" and number.isdigit():
            groups.add(int(number))
        elif sign == "-" and number.isdigit():
            groups.discard(int(number))
    return groups


def sweep(pid: int) -> None:
    """Remove the ipc directories of the worker process `pid`, which has ended."""
    for folder in glob.glob(f"{glob.escape(tempfile.gettempdir())}/{IPC_PREFIX}{pid}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    groups = sorted(watch(sys.stdin))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for group in groups:
        _wait_gone(group)
        sweep(group)


def _wait_gone(group: int) -> None:
    """A group that is being killed may still write for a moment."""
    deadline_s = time.monotonic() + GONE_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline_s:
            os.killpg(group, 0)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
