"""The limit of open files and sockets.

Shells and service managers set a soft limit of 1,024, for programs that use select(2). A router in front of a thousand
workers has more sockets than that, and uses epoll.
"""

import resource


def allow_many_files() -> int:
    """Raise the soft limit to the hard one and return it. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
