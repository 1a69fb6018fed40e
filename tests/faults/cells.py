"""The fault matrix as a table: which cells there are, which make no sense and why, and what each must come to. Pure."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    KILL = "kill"
    RESTART = "restart"
    STOP = "stop"
    CUT = "cut"
    ERROR = "error"


class Victim(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOOTSTRAP = "bootstrap"
    ROUTER = "router"
    DETOKENIZER = "detokenizer"
    PREFILL_SCHEDULER = "prefill-scheduler"
    DECODE_SCHEDULER = "decode-scheduler"


class Phase(StrEnum):
    BOOTSTRAPPING = "bootstrapping"
    WAITING = "waiting"
    TRANSFERRING = "transferring"
    DECODING = "decoding"


BACKENDS = ("nixl", "mooncake")
MOVERS = (Victim.PREFILL, Victim.DECODE)  # whose fault reaches a transfer engine
CHILDREN = {
    Victim.DETOKENIZER: ("decode", "detokenizer"),
    Victim.PREFILL_SCHEDULER: ("prefill", "scheduler"),
    Victim.DECODE_SCHEDULER: ("decode", "scheduler"),
}


@dataclass(frozen=True, order=True)
class Cell:
    fault: Fault
    victim: Victim
    phase: Phase
    backend: str = "nixl"

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.victim}:{self.phase}:{self.backend}"

    @property
    def part(self) -> str:
        """The process that is started again: the victim, or the worker whose child it is."""
        return CHILDREN[self.victim][0] if self.victim in CHILDREN else str(self.victim)


def why_not(cell: Cell) -> str | None:
    """None, or why the cell makes no sense."""
    if cell.fault is Fault.CUT and cell.victim in CHILDREN:
        return "speaks over unix sockets only: no network to cut"
    if cell.fault is Fault.ERROR and cell.victim is Victim.DECODE:
        return "starts no operation: an error at its end is the writer's, the row prefill"
    if cell.fault is Fault.ERROR and cell.victim in (Victim.PREFILL_SCHEDULER, Victim.DECODE_SCHEDULER):
        return "the engine lives in it: the row prefill"
    if cell.fault is Fault.ERROR and cell.victim is not Victim.PREFILL:
        return "has no transfer engine"
    if cell.backend != "nixl" and cell.victim not in MOVERS:
        return "the fault reaches no transfer engine: the row of nixl"
    return None


def all_cells() -> Iterator[Cell]:
    """Every cell, those that make no sense too."""
    for backend in BACKENDS:
        for fault in Fault:
            for victim in Victim:
                yield from (Cell(fault, victim, phase, backend) for phase in Phase)


def chosen(patterns: Sequence[str]) -> list[Cell]:
    """The cells to run whose name any of `patterns` matches (all where there is none); `kill:prefill:*` is a pattern."""
    cells = [cell for cell in all_cells() if why_not(cell) is None]
    return [c for c in cells if not patterns or any(fnmatch.fnmatchcase(c.name, _whole(p)) for p in patterns)]


def _whole(pattern: str) -> str:
    return pattern + ":*" * (3 - pattern.count(":"))


def must_be_right(cell: Cell) -> bool:
    """Whether nothing that a request still needs is lost: an error would be a failure of ours."""
    if cell.fault is Fault.ERROR:
        return True  # nothing was streamed yet: the router sends the request again
    if cell.victim is Victim.BOOTSTRAP:
        return cell.phase is not Phase.BOOTSTRAPPING
    if cell.fault is Fault.STOP and cell.victim in (Victim.ROUTER, Victim.DETOKENIZER):
        return True
    if cell.fault is Fault.CUT and cell.victim is Victim.ROUTER:
        return cell.phase is not Phase.DECODING  # begun streams cannot move
    return cell.phase is Phase.DECODING and cell.part == "prefill"
