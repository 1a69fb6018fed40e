"""What differs between unified, prefill and decode, as the loop sees it. Roles of disaggregation live in disagg/."""

from typing import Protocol

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FinishReason, TokenOutput


class Role(Protocol):
    """Called by the loop only, on its thread; nothing here may block. Each call returns what is to be said now."""

    name: str

    def add(self, request: Request, now_s: float) -> list[TokenOutput]: ...

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]: ...

    def close_to_peers(self, why: str | None) -> None:
        """Refuse, because of `why`, what peers ask this engine to compute from now on (None: take it)."""

    def end_peers_work(self, why: str) -> None:
        """What peers have asked for and is not done yet ends; each of them is told."""

    def poll(self, now_s: float) -> list[TokenOutput]:
        """Once a turn, before planning: queues move on what the outside did."""

    def on_launch(self, plan: Plan) -> None:
        """A step is about to be launched."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        """After a collected step."""

    def waits_for_outside(self) -> bool:
        """Something outside (a transfer, a peer, a timeout) may move a queue: do not sleep long."""

    def queues(self) -> dict[str, int]:
        """How many wait where. With a "waiting" of its own it has counted the scheduler's waiting requests elsewhere."""

    def counters(self) -> dict[str, float]: ...

    def gauges(self) -> dict[str, float]: ...

    def check(self) -> list[str]:
        """What is inconsistent in the role's own state; empty when all is well."""

    def close(self) -> None: ...


class UnifiedRole:
    """Prefill and decode in one engine: the scheduler does it all."""

    name = "unified"
    prefill_only = False

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        return self._scheduler.add(request)

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        return self._scheduler.abort(rid, reason)

    def close_to_peers(self, why: str | None) -> None:
        """It has none."""

    def end_peers_work(self, why: str) -> None:
        """It has none."""

    def poll(self, now_s: float) -> list[TokenOutput]:
        return []

    def on_launch(self, plan: Plan) -> None:
        """Nobody else has to know."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        return effects.outputs

    def waits_for_outside(self) -> bool:
        return False

    def queues(self) -> dict[str, int]:
        return {}

    def counters(self) -> dict[str, float]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def check(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing to end."""
