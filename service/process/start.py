"""What a process arranges for itself or its children as it starts: open files, and the end with its parent."""

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1


def allow_many_files() -> int:
    """Raise the soft limit of open files, usually 1,024, to the hard one and return it. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def die_with_parent(ignored: Sequence[int] = ()) -> Callable[[], None]:
    """Return a child's `preexec_fn` that asks the kernel for SIGKILL when the parent's *thread*, the caller's, ends.

    `ignored`: signals that the child ignores from its first moment, and what it starts does, too.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
