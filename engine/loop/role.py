"""Interface of unified, prefill and decode roles (disagg/), with defaults for no peers."""

from typing import Protocol

from engine.core.outputs import StepEffects
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FinishReason, TokenOutput


class EngineRole(Protocol):
    """Called on the loop's thread, so nothing may block; returned outputs are sent now."""

    name: str

    def add(self, request: Request, now_s: float) -> list[TokenOutput]: ...

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]: ...

    def poll(self, now_s: float) -> list[TokenOutput]:
        """Advance the queues, each iteration before planning."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        """A step has been collected."""

    def close(self) -> None: ...

    def close_to_peers(self, why: str | None) -> None:
        """Refuse peers' work for the reason `why`, or accept it (None)."""
        return None

    def end_peers_work(self, why: str) -> None:
        """End peers' unfinished work and notify them."""
        return None

    def waits_for_outside(self) -> bool:
        """True if a transfer, peer or timeout may advance a queue, so that rests are brief."""
        return False

    def queues(self) -> dict[str, int]:
        """Requests per queue, with the scheduler's."""

    def counters(self) -> dict[str, float]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def avoided_encoders(self) -> list[str]:
        """Control addresses of encoder workers avoided now, as late or unreachable."""
        return []

    def check(self) -> None:
        """Raise AssertionError if its state is inconsistent."""
        return None


class UnifiedRole(EngineRole):
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
        """End nothing."""

    def queues(self) -> dict[str, int]:
        return {"waiting": self._scheduler.num_waiting}
