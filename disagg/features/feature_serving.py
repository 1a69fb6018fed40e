"""Image features that an encoder worker computes for others, once per image.

  take -> WAITING -- no other request encodes its image --> COMPUTING, by Outgoing as a prompt:
      in the tree: locked there, and sent; else a request, encoded by a step

An image is a request with its key for tokens (engine/images.py), so the prefix tree caches
features.
"""

from typing import Any

import msgspec

from disagg.features.recompute import NOTHING, Bounds, images_of
from disagg.metadata import MetadataBuffers
from disagg.outgoing import HandoverStage, Outgoing, PageSender, PrefillHandover, Purpose, Senders
from disagg.role import PeerRole, SendingPart
from engine.core.outputs import StepEffects, output_of, refusal, refused
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.images import ImageInput
from engine.messages import FinishReason, GenerateRequest, KVSource, TokenOutput
from transfer_backends.contract import RecomputeRequest, Work

PAD_ID = 0  # pads an image to whole pages


class FeatureServer(SendingPart):
    """Owner of peers' requests, until no operation reads their pages."""

    def __init__(
        self, *, scheduler: Scheduler, manager: Senders, pages: PageSender, bounds: Bounds, source: KVSource
    ) -> None:
        """`source`: our address."""
        super().__init__(
            Outgoing(scheduler=scheduler, pages=pages, begin=self._begin, name="features", may_begin=self._may_begin)
        )
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._bounds = bounds
        self._source = source
        self._page_size = scheduler.memory.allocator.page_size
        self._encoding: dict[bytes, PrefillHandover] = {}  # by image key
        self._num_queries = self._num_hits = 0

    def take(self, wanted: RecomputeRequest, now_s: float) -> bool:
        """Refuse it unless it is one valid image."""
        image, wrong = self._image_of(wanted.work)
        request = self._request_of(image, wanted, now_s)
        sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
        handover = PrefillHandover(request, wanted.room, moves_bytes=True, sender=sender, purpose=Purpose.FEATURES)
        self._outgoing.open(handover)
        error = self._closed or wrong or self._misfit(request)
        if error:
            self._num_refused += 1
            self._outgoing.refuse(handover, error)
        return True

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request, output, result in effects.prefilled:
            self._pages.add_computed(self._outgoing.handovers[request.rid], output, result)
        self._pages.send_computed(now_s)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._encoding = {key: handover for key, handover in self._encoding.items() if handover.request.finish is None}
        return super().poll(now_s)

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        handover = self._outgoing.handovers.get(rid)
        return None if handover is None else self._outgoing.abort(handover, reason)

    @property
    def metadata(self) -> MetadataBuffers:
        return self._pages.metadata

    # ---- what is asked for

    def _image_of(self, work: Work) -> tuple[ImageInput | None, str]:
        try:
            images = images_of(work, self._bounds)
        except ValueError as error:
            return None, str(error)
        if len(images) != 1 or (images[0].start, images[0].end) != (0, len(work.tokens)):
            return (
                None,
                f"images: an encode worker computes one at a time, whose tokens are all there are; got {len(images)}",
            )
        return images[0], ""

    def _request_of(self, image: ImageInput | None, wanted: RecomputeRequest, now_s: float) -> Request:
        num_tokens = 1 if image is None else image.num_tokens
        ids = [PAD_ID] * (self._scheduler.memory.allocator.pages_for(num_tokens) * self._page_size)
        return Request(
            message=GenerateRequest(
                rid=f"image-{wanted.room}-{wanted.room_attempt}",
                input_ids=ids,
                sampling=NOTHING,
                images=[] if image is None else [image],
            ),
            arrived_s=now_s,
            prefill_only=True,
        )

    def _misfit(self, request: Request) -> str | None:
        most = self._scheduler.memory.allocator.num_pages * self._page_size
        if len(request.input_ids) > most:
            return (
                f"images: one takes {len(request.input_ids)} rows of features, and there is room for {most} "
                "(--vlm-cache-size-mb of the encode worker)"
            )
        unfit = self._scheduler.refusal(request)
        return None if unfit is None else unfit.message

    # ---- moves

    def _may_begin(self, handover: PrefillHandover) -> bool:
        other = self._encoding.get(handover.request.images[0].key)
        return other is None or other.request.finish is not None

    def _begin(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        request = handover.request
        self._num_queries += 1
        if not self._is_cached(request):
            self._encoding[request.images[0].key] = handover
            return self._scheduler.add(request)
        if error := self._scheduler.held.lend(request):
            return [refused(request, error)]
        self._num_hits += 1
        self._pages.add_computed(handover, output_of(request, []), ItemResult(token=None))
        return []

    def _is_cached(self, request: Request) -> bool:
        ids = request.key_tokens(0, request.num_tokens)
        return self._scheduler.memory.cache.num_cached(ids, branch=request.branch) == len(ids) // self._page_size

    # ---- reports

    def queues(self) -> dict[str, int]:
        count, waiting = self._outgoing.count(), self._scheduler.num_waiting
        return {
            "waiting": count[HandoverStage.WAITING] + waiting,
            "encoding": count[HandoverStage.COMPUTING] - waiting,
            "sending_features": count[HandoverStage.TRANSFER] + count[HandoverStage.ENDING],
        }

    def counters(self) -> dict[str, float]:
        failed, sent = sum(self._outgoing.counters.values()), self._pages.counters
        return {
            "mm_cache_queries": self._num_queries,
            "mm_cache_hits": self._num_hits,
            "features_sent": sent["kv_transfers"],
            "feature_sent_bytes": sent["kv_sent_bytes"],
            "features_unsent": failed,
            "features_refused": self._num_refused,
        }

    def info(self) -> dict[str, Any]:
        named = {"control": self._source.control, "incarnation": self._source.incarnation}
        return {"image_encoder": msgspec.json.encode(named).decode()}

    def gauges(self) -> dict[str, float]:
        allocator, live = self._scheduler.memory.allocator, self._outgoing.handovers.values()
        queued = sum(h.request.num_tokens for h in live if h.stage is HandoverStage.WAITING)
        return {
            "mm_cache_used_bytes": float((allocator.num_pages - allocator.num_free) * self._pages.page_bytes),
            "mm_cache_total_bytes": float(allocator.num_pages * self._pages.page_bytes),
            "mm_cache_hit_rate": self._num_hits / self._num_queries if self._num_queries else 0.0,
            "waiting_tokens": float(queued + self._scheduler.waiting_tokens),
        }


# ---- The role of an encoder worker: requests of peers, and its frontend's test images.

NO_TOKENS = refusal(
    "this is an encode worker (--disaggregation-mode encode): it generates nothing; ask the router", status=400
)


class EncodeRole(PeerRole):
    name = "encode"

    def __init__(self, scheduler: Scheduler, manager: Senders, server: FeatureServer) -> None:
        super().__init__(scheduler, manager, server.metadata, (server,))
        self._manager = manager

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        """Encode images of the frontend, and return no features."""
        if not (request.images and request.message.alone):
            return [refused(request, NO_TOKENS)]
        return super().add(request, now_s)

    def poll(self, now_s: float) -> list[TokenOutput]:
        for wanted in self._manager.take_recompute_requests():
            self.take(wanted, now_s)
        return super().poll(now_s)
