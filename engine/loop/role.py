"""Interface of unified, prefill and decode roles (disagg/), with defaults for no peers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.loop.listeners import LoopListener
from engine.messages import FinishReason, TokenOutput


class RolePart(LoopListener):
    """A role, or a feature of one. Called on the loop's thread, so nothing may block."""

    def poll(self, now_s: float) -> list[TokenOutput]:
        """Advance the queues, each iteration before planning; return outputs to send now."""
        return []

    def close_to_peers(self, why: str | None) -> None:
        """Refuse peers' work for the reason `why`, or accept it (None)."""

    def end_peers_work(self, why: str) -> None: ...

    def close(self) -> None:
        """Free what the process's end does not."""

    # ---- reports

    def queues(self) -> dict[str, int]:
        return {}

    def counters(self) -> Mapping[str, float]:
        return {}

    def gauges(self) -> Mapping[str, float]:
        return {}

    def info(self) -> dict[str, Any]:
        """Facts for /server_info, from which routers learn its address for peers."""
        return {}

    def state(self) -> dict[str, Any]:
        """Fields of StateReply that the role adds."""
        return {}

    def check(self) -> None: ...


class EngineRole(RolePart, ABC):
    name: str

    @abstractmethod
    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        """Accept or refuse a request; return outputs to send now."""

    @abstractmethod
    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]: ...

    def move_out(self, rid: str, room: int, now_s: float) -> list[TokenOutput]:
        """End a request that another worker continues; its KV may wait in `room`."""
        return []


class UnifiedRole(EngineRole):
    name = "unified"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        return self._scheduler.add(request)

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        return self._scheduler.abort(rid, reason)

    def queues(self) -> dict[str, int]:
        return {"waiting": self._scheduler.num_waiting}
