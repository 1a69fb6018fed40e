"""The end of a leader's loop by its ranks: late ones, and those that have ended."""

import os
import time
from functools import partial

from disagg.config import SchedulerSpec
from engine.kernels.build import RanksEnded
from engine.loop.heartbeat import IterationClock, Watchdog, dump_of_others, end_with_stacks
from engine.loop.loop import EngineLoop
from engine.loop.ports import SocketPorts
from engine.parallel.rendezvous import LOST_S
from engine.ranks.group import Group

NAMED_WITHIN_S = 5.0  # the parent looks at its children more often


def watchdog_of(turns: IterationClock, group: Group | None) -> Watchdog:
    """Return one that names late ranks, too."""
    return Watchdog(turns) if group is None else Watchdog(turns, on_stall=partial(_end_with_late_ranks, group))


def run_until_ranks_end(loop: EngineLoop, spec: SchedulerSpec, ports: SocketPorts, group: Group | None) -> None:
    """Raises RanksEnded, unless the parent names the first rank."""
    try:
        loop.run()
    except RanksEnded:
        if spec.joint is not None:
            _await_parent(loop, ports)
            return
        if group is not None:
            group.followers.await_end(2 * LOST_S)
        raise


def _end_with_late_ranks(group: Group, stalled_s: float) -> None:
    late = group.late()
    dump_of_others(group.pids[rank] for rank in late if rank in group.pids and group.pids[rank] != os.getpid())
    end_with_stacks(stalled_s, found=f"waits for {group.late_text(late)}" if late else "")


def _await_parent(loop: EngineLoop, ports: SocketPorts) -> None:
    """With DP attention, wait for the parent to end this rank and name the one that ended first."""
    deadline_s = time.monotonic() + NAMED_WITHIN_S
    while not loop.stopped and (left_s := deadline_s - time.monotonic()) > 0:
        ports.wait(left_s)
