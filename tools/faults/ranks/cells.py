"""Which rank suffers what, and when. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tools.faults.cells import BACKENDS
from tools.faults.ranks.rig import FOLLOWER, LEADER
from tools.faults.rig import WORKERS


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
