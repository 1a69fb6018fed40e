"""Usable CPU cores. Never torch: threads are counted before its import."""

import os


def usable_cores() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else len(os.sched_getaffinity(0))
