"""Open files, and the end with the parent process."""

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1


def allow_many_files() -> int:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def die_with_parent(ignored: Sequence[int] = ()) -> Callable[[], None]:
    """Return a `preexec_fn` for SIGKILL at the end of the calling *thread*."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
