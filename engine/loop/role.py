"""What differs between unified, prefill and decode. Roles of disaggregation live in disagg/."""

from typing import Protocol, runtime_checkable

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FinishReason, TokenOutput, TransferPath


class EngineRole(Protocol):
    """Called on the loop's thread; nothing may block. Each call returns the outputs to send now."""

    name: str

    def add(self, request: Request, now_s: float) -> list[TokenOutput]: ...

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]: ...

    def poll(self, now_s: float) -> list[TokenOutput]:
        """Advance the queues, once a turn before planning."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        """A step has been collected."""

    def close(self) -> None: ...


@runtime_checkable
class Peered(Protocol):
    """A role that exchanges KV with peers. It inherits what does not concern it."""

    def close_to_peers(self, why: str | None) -> None:
        """Refuse work of peers because of `why`; None: accept it."""
        return None

    def end_peers_work(self, why: str) -> None:
        """End unfinished work for peers, and notify them."""

    def move_out(self, rid: str, room: int, now_s: float) -> list[TokenOutput]:
        """End a request here, because another worker goes on with it. Its KV waits in `room`, if there is any."""
        return []

    def on_launch(self, plan: Plan) -> None:
        """A step is about to be launched."""
        return None

    def waits_for_outside(self) -> bool:
        """Whether a transfer, a peer or a timeout may advance a queue: the loop rests briefly."""

    def queues(self) -> dict[str, int]:
        """Count the requests in each queue, those in the scheduler included."""

    def counters(self) -> dict[str, float]: ...

    def gauges(self) -> dict[str, float]:
        return {}

    def transfer_paths(self) -> list[TransferPath]:
        """Return the transfer paths to the newest peers, a bounded number."""
        return []

    def avoided_encoders(self) -> list[str]:
        """Control addresses of encoder workers that are asked for nothing at present: they were late, or could not be reached."""
        return []

    def check(self) -> None:
        """Raise AssertionError if the role's own state is inconsistent."""


class UnifiedRole:
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
