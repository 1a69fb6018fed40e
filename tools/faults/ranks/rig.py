"""Which rank suffers what, and when; and the cluster of the fault matrix with two ranks a worker, each of which can be hit alone."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import httpx2 as httpx
import psutil

from tools.faults.cells import BACKENDS
from tools.faults.rig import WORKERS, Rig

WATCHDOG_S = 6.0
# A KV head a unit: the four shapes of a pair move each page in pieces, from and to every rank.
RANKS = ("--model-path", "recall-wide", "--tp-size", "2", "--kv-units", "4", "--disaggregation-kv-checksum")
LIMITS = ("--watchdog-timeout", str(WATCHDOG_S), "--dist-timeout", "60")
LEADER, FOLLOWER = "leader", "follower"
MODULES = {LEADER: "disagg.processes.scheduler_process", FOLLOWER: "disagg.processes.rank_process"}


class RankFault(StrEnum):
    KILL = "kill"
    STOP = "stop"  # SIGSTOP for good: the watchdog ends the worker
    HANG = "hang"  # a step that the follower never ends: the watchdog writes its stacks, too
    ORPHAN = "orphan"  # the leader is killed, and its stopped follower outlives it: the kernel's help is off


class RankPhase(StrEnum):
    LOAD = "load"
    IDLE = "idle"
    FORWARD = (
        "forward"  # the follower has a step of prefill that it does not begin, so the leader waits in its first sum
    )
    TRANSFER = "transfer"
    DECODE = "decode"


@dataclass(frozen=True)
class RankCell:
    fault: RankFault
    part: str
    rank: str
    phase: RankPhase
    backend: str

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.part}:{self.rank}:{self.phase}:{self.backend}"


def rank_cells() -> Iterator[RankCell]:
    """A stopped leader is a stopped scheduler: the row freeze of the other matrix."""
    for backend in BACKENDS:
        for part in WORKERS:
            for phase in RankPhase:
                if phase is RankPhase.FORWARD and part == "decode":
                    continue
                yield from (RankCell(RankFault.KILL, part, rank, phase, backend) for rank in (LEADER, FOLLOWER))
                if phase is not RankPhase.LOAD:
                    yield RankCell(RankFault.STOP, part, FOLLOWER, phase, backend)
        yield RankCell(RankFault.HANG, "prefill", FOLLOWER, RankPhase.FORWARD, backend)
        yield RankCell(RankFault.HANG, "decode", FOLLOWER, RankPhase.DECODE, backend)
        yield RankCell(RankFault.ORPHAN, "prefill", LEADER, RankPhase.TRANSFER, backend)


class RankRig(Rig):
    switched = WORKERS

    def _command(self, name: str) -> list[str]:
        command = super()._command(name)
        return [*command, *RANKS, *LIMITS] if command[0] == "serve" else command

    def rank(self, part: str, which: str) -> psutil.Process | None:
        """The process of a worker's leader or follower; None: not yet there."""
        for process in self.parts[part].tree()[1:]:
            with contextlib.suppress(psutil.Error):
                if MODULES[which] in process.cmdline():
                    return process
        return None

    def log(self, part: str) -> str:
        return self.parts[part].log.read_text(errors="replace")

    def is_in_a_step(self, part: str) -> bool:
        """Whether its scheduler's loop answers nothing: it waits for the follower."""
        try:
            httpx.get(f"{self.parts[part].url}/check", timeout=1.0)
        except httpx.TimeoutException:
            return True
        return False
