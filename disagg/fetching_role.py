"""A worker that serves whole requests, and gets features of their images from encode workers."""

from disagg.feature_fetching import FeatureFetches
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.loop.role import UnifiedRole
from engine.messages import FinishReason, TokenOutput


class FetchingRole(UnifiedRole):
    def __init__(self, scheduler: Scheduler, features: FeatureFetches) -> None:
        super().__init__(scheduler)
        self._features = features

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        refused = super().add(request, now_s)
        if request.encoders and not refused:
            self._features.begin(request, now_s)
        return refused

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        self._features.leave(rid)
        return super().abort(rid, now_s, reason)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._features.poll(now_s)
        return []

    def end_peers_work(self, why: str) -> None:
        self._features.incoming.end_all(why)

    def waits_for_outside(self) -> bool:
        return self._features.waits_for_outside

    def queues(self) -> dict[str, int]:
        return {"waiting": self._scheduler.num_waiting, **self._features.queues()}

    def counters(self) -> dict[str, float]:
        return dict(self._features.counters)

    def avoided_encoders(self) -> list[str]:
        return self._features.avoided()

    def check(self) -> None:
        self._features.check()

    def close(self) -> None:
        self._features.close()
