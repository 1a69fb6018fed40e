"""GPU memory readings, and the wait for this process's share (engine/device/memory_plan.py).

Workers on one GPU never race: each stays in its share of the total.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from service.flags import ConfigError

GRAPH_BYTES = 32 << 20  # per graph, an estimate: they share one memory pool
WAIT_S = 30.0  # an ended process frees its memory a little later
ASK_EVERY_S = 0.5

log = logging.getLogger(__name__)


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


class MemoryGauge(Protocol):
    def total(self) -> int: ...

    def free(self) -> int:
        """Bytes free for any process."""

    def own(self) -> int:
        """Bytes of this process."""

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        """This process's maximum since `begin_peak`."""

    def release(self) -> None:
        """Free torch's cache."""


def await_share(
    gauge: MemoryGauge,
    share: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait up to WAIT_S for this process's share. Raises ConfigError with others' usage."""
    total, until_s = gauge.total(), clock() + WAIT_S
    asked = False
    while (ours := gauge.free() + gauge.own()) < int(share * total):
        if not asked:
            log.info(
                "GPU memory: others use %s of %s GiB; waiting up to %g s for it", gib(total - ours), gib(total), WAIT_S
            )
            asked = True
        if clock() >= until_s:
            raise ConfigError(_short(total, ours, share))
        sleep(ASK_EVERY_S)


def _short(total: int, ours: int, share: float) -> str:
    fits = int(max(0, ours) / total * 100) / 100
    return (
        f"--mem-fraction-static {share:g}: {gib(int(share * total))} of the GPU's {gib(total)} GiB are this worker's, and other "
        f"processes use {gib(total - ours)}; give each worker on this GPU its share (at most {fits:g} fits here now). If no "
        "process of that size runs (nvidia-smi), a peer still maps the memory of a worker that has ended: restart the peer"
    )
