"""What differs between unified, prefill and decode, as the loop sees it. Roles of disaggregation live in disagg/.

Every role is an `EngineRole`. One that hands KV to peers, or gets it from them, is `Peered`, too.
"""

from typing import Protocol, runtime_checkable

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FinishReason, TokenOutput


class EngineRole(Protocol):
    """Called by the loop only, on its thread; nothing here may block. Each call returns the outputs to send now."""

    name: str

    def add(self, request: Request, now_s: float) -> list[TokenOutput]: ...

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]: ...

    def poll(self, now_s: float) -> list[TokenOutput]:
        """Move queues on what happened outside. Once a turn, before planning."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        """A step has been collected."""

    def close(self) -> None: ...


@runtime_checkable
class Peered(Protocol):
    """The half of a role that has to do with other workers."""

    def close_to_peers(self, why: str | None) -> None:
        """Refuse work of peers from now on, because of `why` (None: accept it)."""

    def end_peers_work(self, why: str) -> None:
        """End unfinished work for peers, and tell them."""

    def on_launch(self, plan: Plan) -> None:
        """A step is about to be launched."""

    def waits_for_outside(self) -> bool:
        """Something outside (a transfer, a peer, a timeout) may move a queue: do not sleep long."""

    def queues(self) -> dict[str, int]:
        """How many requests wait where, those in the scheduler included."""

    def counters(self) -> dict[str, float]: ...

    def gauges(self) -> dict[str, float]: ...

    def check(self) -> None:
        """Check the role's own state. Raises AssertionError."""


class UnifiedRole:
    """Prefill and decode in one engine: the scheduler does it all."""

    name = "unified"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        return self._scheduler.add(request)

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        return self._scheduler.abort(rid, reason)

    def poll(self, now_s: float) -> list[TokenOutput]:
        return []

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        return effects.outputs

    def close(self) -> None:
        """Nothing to end."""
