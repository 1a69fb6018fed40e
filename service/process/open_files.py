"""How many files and sockets this process may open: as many as the system lets it. Owns nothing.

Shells and service managers start processes with a soft limit of 1,024, for the sake of programs that use select(2); a router in
front of a thousand workers has more sockets than that. Ours use epoll.
"""

import resource


def allow_many_files() -> int:
    """Raise the soft limit to the hard one; returns what is allowed now. Processes started from here inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
