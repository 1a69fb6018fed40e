"""A child process that cannot outlive its parent, from before its first instruction."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None]:
    """Return a child's `preexec_fn` that asks the kernel for SIGKILL when the parent's *thread*, the caller's, ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
