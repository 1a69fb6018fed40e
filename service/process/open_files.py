"""The limit of open files: the usual 1,024 is for programs with select(2); a router of a thousand workers has more sockets."""

import resource


def allow_many_files() -> int:
    """Raise the soft limit to the hard one and return it. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
