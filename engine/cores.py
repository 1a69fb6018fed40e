"""The cores that a process may use. Never torch: threads are counted before it is imported."""

import os


def usable_cores() -> int:
    """Return OMP_NUM_THREADS if set, else the cores that this process may use."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else len(os.sched_getaffinity(0))
