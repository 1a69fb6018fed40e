"""Setup of a forked process, as in a new interpreter."""

import fcntl
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from service.process.fork_messages import ForkRequest
from service.process.title import set_command_line

STARTED_BY = "--started-by="  # in the command line of `ps`: the requesting process
FIRST_FREE = 3  # after stdin, stdout, stderr


def become(request: ForkRequest, received: Sequence[int]) -> None:
    """Take over descriptors (`received`: stdout, stderr, others) and the request's environment."""
    _place(received, (1, 2, *request.descriptors))
    with suppress(OSError):  # a group of another session
        os.setpgid(0, request.group)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None  # depends on the environment
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for ignored in request.ignored:
        signal.signal(ignored, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [request.module, *request.argv]
    set_command_line((sys.executable, "-m", request.module, f"{STARTED_BY}{request.client}", *request.argv))


def _place(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Renumber descriptors; close others but stdin."""
    above = max(FIRST_FREE, *wanted, *received) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    os.closerange(FIRST_FREE, above)
    for descriptor, number in zip(moved, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def run(request: ForkRequest) -> int:
    """Run `python -m module argv`; return the status."""
    try:
        return int(importlib.import_module(request.module).main(request.argv))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
