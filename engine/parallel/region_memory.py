"""Makes the memory of a `SharedRegion`. Never torch: where no rank leads, the process that starts the ranks computes nothing."""

import fcntl
import os

from engine.parallel.region_plan import RegionPlan


def new_memory(plan: RegionPlan) -> int:
    """Return a descriptor of zeroed memory for `plan`, which the caller closes. It has no name and keeps its size."""
    descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, plan.size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
