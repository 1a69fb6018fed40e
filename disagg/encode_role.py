"""The role of an encoder worker: requests of peers, and its frontend's test images."""

from disagg.feature_serving import FeatureServer
from disagg.handover import Senders
from disagg.metadata import MetadataBuffers
from engine.core.outputs import StepEffects, refusal, refused
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.loop.role import EngineRole
from engine.messages import FinishReason, KVSource, TokenOutput

NO_TOKENS = refusal(
    "this is an encode worker (--disaggregation-mode encode): it generates nothing; ask the router", status=400
)


class EncodeRole(EngineRole):
    name = "encode"

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Senders,
        server: FeatureServer,
        metadata: MetadataBuffers,
        page_bytes: int,
        source: KVSource,
    ) -> None:
        """Give peers the address `source`; `page_bytes` are of feature pages."""
        self.source = source
        self._scheduler = scheduler
        self._manager = manager
        self._server = server
        self._metadata = metadata
        self._page_bytes = page_bytes
        self._closed_to_peers: str | None = None

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        """Encode images of the frontend, and return no features."""
        if not (request.images and request.alone):
            return [refused(request, NO_TOKENS)]
        return self._scheduler.add(request)

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        return [] if self._server.abort(rid, reason) else self._scheduler.abort(rid, reason)

    def close_to_peers(self, why: str | None) -> None:
        self._closed_to_peers = why

    def end_peers_work(self, why: str) -> None:
        self._server.end_all(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        for wanted in self._manager.take_recompute_requests():
            self._server.take(wanted, now_s, refused=self._closed_to_peers)
        self._server.poll(now_s)
        return []

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        self._server.on_step(effects, now_s)
        return effects.outputs

    # ---- reports

    def waits_for_outside(self) -> bool:
        return len(self._server) > 0

    def queues(self) -> dict[str, int]:
        return self._server.queues()

    def counters(self) -> dict[str, float]:
        return {**self._manager.counters, **self._server.all_counters()}

    def gauges(self) -> dict[str, float]:
        allocator = self._scheduler.memory.allocator
        return {
            "mm_cache_used_bytes": float((allocator.num_pages - allocator.num_free) * self._page_bytes),
            "mm_cache_total_bytes": float(allocator.num_pages * self._page_bytes),
            "mm_cache_hit_rate": self._server.hit_rate,
            "waiting_tokens": float(self._server.waiting_tokens),
        }

    def check(self) -> None:
        owned, used = self._server.num_rows, self._metadata.num_used
        assert owned == used, f"{used} metadata rows used, {owned} owned"
        self._metadata.check()
        self._manager.check()

    def close(self) -> None:
        self._manager.close()
