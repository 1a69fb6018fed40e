"""A worker that serves whole requests, and gets features of their images from encode workers."""

from disagg.feature_fetching import FeatureFetches
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FinishReason, TokenOutput, TransferPath


class FetchingRole:
    name = "unified"

    def __init__(self, scheduler: Scheduler, features: FeatureFetches) -> None:
        self._scheduler = scheduler
        self._features = features

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        refused = self._scheduler.add(request)
        if request.encoders and not refused:
            self._features.begin(request, now_s)
        return refused

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        self._features.leave(rid)
        return self._scheduler.abort(rid, reason)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._features.poll(now_s)
        return []

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        return effects.outputs

    # ---- as others see a role with peers

    def close_to_peers(self, why: str | None) -> None:
        """Do nothing: no peer asks this worker for work."""

    def end_peers_work(self, why: str) -> None:
        self._features.incoming.end_all(why)

    def move_out(self, rid: str, room: int, now_s: float) -> list[TokenOutput]:
        """No other worker goes on with its requests."""
        return []

    def on_launch(self, plan: Plan) -> None:
        """Nothing leaves with a step."""

    def waits_for_outside(self) -> bool:
        return self._features.waits_for_outside

    def queues(self) -> dict[str, int]:
        return {"waiting": self._scheduler.num_waiting, **self._features.queues()}

    def counters(self) -> dict[str, float]:
        return self._features.all_counters()

    def gauges(self) -> dict[str, float]:
        return {}

    def avoided_encoders(self) -> list[str]:
        return self._features.avoided()

    def transfer_paths(self) -> list[TransferPath]:
        return []

    def check(self) -> None:
        self._features.check()

    def close(self) -> None:
        self._features.close()
