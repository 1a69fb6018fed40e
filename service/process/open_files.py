"""The limit of open files: usually 1,024, and a router of a thousand workers has more sockets."""

import resource


def allow_many_files() -> int:
    """Raise the soft limit to the hard one and return it. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
