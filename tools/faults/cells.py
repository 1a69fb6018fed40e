"""The fault matrix as a table: which cells there are, which make no sense and why, and what each must come to. Pure."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class Fault(StrEnum):
    KILL = "kill"
    RESTART = "restart"
    STOP = "stop"
    CUT = "cut"
    UNPLUG = "unplug"
    UNPLUG_FOR_GOOD = "unplug-for-good"
    FREEZE = "freeze"
    DRAIN = "drain"
    ERROR = "error"
    ERROR_TWICE = "error-twice"
    ERROR_ALWAYS = "error-always"


class Victim(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOOTSTRAP = "bootstrap"
    ROUTER = "router"
    PREFILL_SCHEDULER = "prefill-scheduler"
    DECODE_SCHEDULER = "decode-scheduler"


class Phase(StrEnum):
    BOOTSTRAPPING = "bootstrapping"
    WAITING = "waiting"
    TRANSFERRING = "transferring"
    DECODING = "decoding"


class Layout(StrEnum):
    """Where the parts of a cell's cluster stand, and what can be cut there."""

    PLAIN = "plain"  # one machine, one link: decode's look-up
    LINKS = "links"  # one machine, all TCP connections between parts over links of ours
    MACHINES = "machines"  # prefill and decode on machines of their own, on cables


class Size(StrEnum):
    """How many workers of each role a cell's cluster has."""

    SINGLE = "single"
    PAIRS = "pairs"

    @property
    def workers(self) -> int:
        return 1 if self is Size.SINGLE else 2


BACKENDS = ("nixl", "mooncake")
SILENCE_S = 3.0  # of pairs: the longest that the client of a lost worker waits for its next token
MOVERS = (Victim.PREFILL, Victim.DECODE)  # they have a transfer engine
AWAY = (Fault.KILL, Fault.FREEZE, Fault.DRAIN)  # the victim stays away until the survivors are clean
DIES = (*AWAY, Fault.RESTART)
ERRORS = (Fault.ERROR, Fault.ERROR_TWICE, Fault.ERROR_ALWAYS)
UNPLUGS = (Fault.UNPLUG, Fault.UNPLUG_FOR_GOOD)
CHILDREN = {
    Victim.PREFILL_SCHEDULER: ("prefill", "scheduler"),
    Victim.DECODE_SCHEDULER: ("decode", "scheduler"),
}


@dataclass(frozen=True, order=True)
class Cell:
    fault: Fault
    victim: Victim
    phase: Phase
    backend: str = "nixl"
    size: Size = Size.SINGLE

    @property
    def name(self) -> str:
        name = f"{self.fault}:{self.victim}:{self.phase}:{self.backend}"
        return name if self.size is Size.SINGLE else f"{name}:{self.size}"

    @property
    def part(self) -> str:
        """The process that is started again: the victim, or the worker whose child it is."""
        return CHILDREN[self.victim][0] if self.victim in CHILDREN else str(self.victim)


def why_not(cell: Cell) -> str | None:
    """None, or why the cell makes no sense."""
    if cell.fault is Fault.CUT and cell.victim in CHILDREN:
        return "speaks over unix sockets only: no network to cut"
    if cell.fault in UNPLUGS and cell.victim not in MOVERS:
        return "no data path of an engine: the row cut"
    if cell.fault is Fault.DRAIN and cell.victim in CHILDREN:
        return "SIGTERM is for the worker, which ends its children itself"
    if cell.size is Size.PAIRS and (reason := _why_no_pairs(cell)):
        return reason
    if cell.fault in ERRORS:
        return _why_no_error(cell.victim)
    if cell.backend != "nixl" and cell.victim not in MOVERS:
        return "the fault reaches no transfer engine: the row of nixl"
    return None


def _why_no_pairs(cell: Cell) -> str | None:
    if cell.part not in MOVERS:
        return "there is one of it, however many workers there are: the row of one worker a role"
    if cell.fault in ERRORS:
        return "no worker is lost: the row of one worker a role"
    if cell.fault is Fault.CUT:
        return "decode workers share the links of look-ups: the rows unplug cut off one alone, and more of it"
    return None


def _why_no_error(victim: Victim) -> str | None:
    if victim is Victim.DECODE:
        return "starts no operation: an error at its end is the writer's, the row prefill"
    if victim in (Victim.PREFILL_SCHEDULER, Victim.DECODE_SCHEDULER):
        return "the engine lives in it: the row prefill"
    return None if victim is Victim.PREFILL else "has no transfer engine"


def layout_of(cell: Cell) -> Layout:
    if cell.fault in UNPLUGS:
        return Layout.MACHINES
    return Layout.LINKS if cell.fault is Fault.CUT else Layout.PLAIN


def all_cells() -> Iterator[Cell]:
    """Every cell, those that make no sense too."""
    for size, backend, fault, victim, phase in product(Size, BACKENDS, Fault, Victim, Phase):
        yield Cell(fault, victim, phase, backend, size)


def chosen(patterns: Sequence[str]) -> list[Cell]:
    """The cells to run whose name any of `patterns` matches (all where there is none); `kill:prefill:*`, `*:pairs` are patterns."""
    cells = [cell for cell in all_cells() if why_not(cell) is None]
    return [cell for cell in cells if not patterns or any(_matches(cell, pattern) for pattern in patterns)]


def _matches(cell: Cell, pattern: str) -> bool:
    whole = pattern + ":*" * (3 - pattern.count(":"))
    return any(fnmatch.fnmatchcase(cell.name, one) for one in (pattern, whole))


def must_be_right(cell: Cell) -> bool:
    """Whether nothing that a request still needs is lost: an error would be a failure of ours.

    With two workers of each role nothing ever is: answers go on at the other one.
    """
    if cell.size is Size.PAIRS:
        return True
    if cell.fault in (Fault.ERROR, Fault.ERROR_TWICE):
        return True  # nothing was streamed yet: the router sends the request again
    if cell.fault is Fault.DRAIN and cell.victim is not Victim.BOOTSTRAP:
        return True  # what runs is finished
    if cell.victim is Victim.BOOTSTRAP:
        return cell.phase is not Phase.BOOTSTRAPPING
    if cell.fault is Fault.STOP and cell.victim is Victim.ROUTER:
        return True  # the workers go on; to a router that is cut off they are silent, and no other takes over
    return cell.phase is Phase.DECODING and cell.part == "prefill"
