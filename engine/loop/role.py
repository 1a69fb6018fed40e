"""What differs between unified, prefill and decode. Roles of disaggregation live in disagg/."""

from typing import Protocol

from engine.core.outputs import StepEffects
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FinishReason, TokenOutput


class EngineRole(Protocol):
    """Called on the loop's thread; nothing may block. Calls that return outputs return those to send now.

    A role inherits what does not concern it: defaults are as without peers, which KV or features are exchanged with.
    """

    name: str

    def add(self, request: Request, now_s: float) -> list[TokenOutput]: ...

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]: ...

    def poll(self, now_s: float) -> list[TokenOutput]:
        """Advance the queues, once a turn before planning."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        """A step has been collected."""

    def close(self) -> None: ...

    def close_to_peers(self, why: str | None) -> None:
        """Refuse work of peers because of `why`; None: accept it."""
        return None

    def end_peers_work(self, why: str) -> None:
        """End unfinished work for peers, and notify them."""
        return None

    def waits_for_outside(self) -> bool:
        """Whether a transfer, a peer or a timeout may advance a queue: the loop rests briefly."""
        return False

    def queues(self) -> dict[str, int]:
        """Count the requests in each queue, those in the scheduler included."""

    def counters(self) -> dict[str, float]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def avoided_encoders(self) -> list[str]:
        """Control addresses of encoder workers that are asked for nothing at present: they were late, or could not be reached."""
        return []

    def check(self) -> None:
        """Raise AssertionError if the role's own state is inconsistent."""
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
