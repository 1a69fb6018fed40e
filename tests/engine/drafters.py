"""Engines whose drafter always drafts, whatever steps cost on this machine; and what its drafts came to."""

from dataclasses import dataclass

from engine.core.scheduler import Scheduler
from tests.core.guesses import FreePasses, FreeRows
from tests.engine.engine_in_process import EngineInProcess


def always(scheduler: Scheduler) -> None:
    """Let all drafts pay."""
    assert scheduler.drafting is not None
    scheduler.drafting.costs, scheduler.drafting.pass_costs = FreeRows(), FreePasses()


@dataclass(frozen=True)
class Fared:
    """`passes`: steps of the drafter."""

    passes: int
    drafts: int
    accepted: int


def fared(engine: EngineInProcess) -> Fared:
    counters = engine.parts.scheduler.counters
    return Fared(counters.draft_steps, counters.drafts, counters.accepted_drafts)
