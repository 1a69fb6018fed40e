"""Transfers of image features: memory of both sides, and an encoder worker's role."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

from disagg.config import SchedulerSpec
from disagg.feature_fetching import MAX_FETCHES, FeatureFetches, rooms_of
from disagg.metadata import Checksum, MetadataBuffers
from disagg.outgoing import HandoverStage, Outgoing, PageSender, PrefillHandover, Purpose, Senders
from disagg.resumption import NOTHING, Bounds, images_of
from disagg.transfer_engine import engine_of, memory_of, no_lookup, start, transfer_config
from engine.build import EngineParts
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.outputs import StepEffects, output_of, refusal, refused
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.encoder import EncoderParts
from engine.images import ImageInput
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from engine.loop.role import EngineRole
from engine.messages import FinishReason, GenerateRequest, KVSource, TokenOutput
from engine.model_files.model_config import ModelConfig
from engine.ranks.rank_checksum import RankChecksum, alone
from engine.ranks.rank_parts import RankPools
from transfer_backends.contract import KVArgs, RecomputeRequest, Work
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.prefill.manager import PrefillManager

PAD_ID = 0  # pads an image to whole pages


class FeatureServer:
    """Owner of peers' requests, until no operation reads their pages.

    Image features that an encoder worker computes for others, once per image.

      take -> WAITING -- no other request encodes its image --> COMPUTING, by Outgoing as a prompt:
          in the tree: locked there, and sent; else a request, encoded by a step

    An image is a request with its key for tokens (engine/images.py), so the prefix tree caches
    features.
    """

    def __init__(self, *, scheduler: Scheduler, manager: Senders, pages: PageSender, bounds: Bounds) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._bounds = bounds
        self._page_size = scheduler.memory.allocator.page_size
        self._outgoing = Outgoing(
            scheduler=scheduler, pages=pages, begin=self._begin, name="features", may_begin=self._may_begin
        )
        self._encoding: dict[bytes, PrefillHandover] = {}  # by image key
        self._num_queries = self._num_hits = self._num_refused = 0

    def take(self, wanted: RecomputeRequest, now_s: float, *, refused: str | None) -> None:
        """Open a peer's request; refuse it for `refused`, or unless it is one valid image."""
        image, wrong = self._image_of(wanted.work)
        request = self._request_of(image, wanted, now_s)
        sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
        handover = PrefillHandover(request, wanted.room, moves_bytes=True, sender=sender, purpose=Purpose.FEATURES)
        self._outgoing.open(handover)
        error = refused or wrong or self._misfit(request)
        if error:
            self._num_refused += 1
            self._outgoing.refuse(handover, error)

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request, output, result in effects.prefilled:
            self._pages.add_computed(self._outgoing.handovers[request.rid], output, result)
        self._pages.send_computed(now_s)

    def poll(self, now_s: float) -> None:
        self._encoding = {key: handover for key, handover in self._encoding.items() if handover.request.finish is None}
        self._outgoing.poll(now_s)

    def abort(self, rid: str, reason: FinishReason) -> bool:
        handover = self._outgoing.handovers.get(rid)
        if handover is not None:
            self._outgoing.abort(handover, reason)
        return handover is not None

    def end_all(self, why: str) -> None:
        for handover in list(self._outgoing.handovers.values()):
            self._outgoing.abort(handover, FinishReason(kind="abort", message=why))

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

    def __len__(self) -> int:
        return len(self._outgoing.handovers)

    @property
    def num_rows(self) -> int:
        return self._outgoing.num_rows

    def queues(self) -> dict[str, int]:
        count, waiting = self._outgoing.count(), self._scheduler.num_waiting
        return {
            "waiting": count[HandoverStage.WAITING] + waiting,
            "encoding": count[HandoverStage.COMPUTING] - waiting,
            "sending_features": count[HandoverStage.TRANSFER] + count[HandoverStage.ENDING],
        }

    @property
    def waiting_tokens(self) -> int:
        live = self._outgoing.handovers.values()
        queued = sum(h.request.num_tokens for h in live if h.stage is HandoverStage.WAITING)
        return queued + self._scheduler.waiting_tokens

    def all_counters(self) -> dict[str, float]:
        failed, sent = sum(self._outgoing.counters.values()), self._pages.counters
        return {
            "mm_cache_queries": self._num_queries,
            "mm_cache_hits": self._num_hits,
            "features_sent": sent["kv_transfers"],
            "feature_sent_bytes": sent["kv_sent_bytes"],
            "features_unsent": failed,
            "features_refused": self._num_refused,
        }

    @property
    def hit_rate(self) -> float:
        return self._num_hits / self._num_queries if self._num_queries else 0.0


# ---- The role of an encoder worker: requests of peers, and its frontend's test images.

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
        if not (request.images and request.message.alone):
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


# ---- feature transfers

FETCH_TIMEOUT_S = 10.0  # per image: encoding it here takes less, and a prompt waits
HANDSHAKE_S = 3.0  # maximum for an encode worker: a prompt waits, and can do without


def encode_role(spec: SchedulerSpec, parts: EncoderParts, *, wakeup: Callable[[], None]) -> EncodeRole:
    """Raises BackendUnavailable. Transfer threads call `wakeup` when a queue may move."""
    config, scheduler = parts.config, parts.scheduler
    assert config.context_length is not None, "resolved"
    parts.weights.number()  # now: no transfer should read files
    metadata = MetadataBuffers(2 * scheduler.limits.max_running_requests, weights=parts.weights.number)
    args = feature_args(spec, parts.pool, metadata, parts.model, dtype=config.dtype)
    manager = PrefillManager(args, engine_of(spec, parts.pool), transfer_config(spec))
    start(manager, wakeup)
    pages = PageSender(
        metadata,
        page_size=parts.pool.page_size,
        page_bytes=parts.pool.page_bytes,
        checksum=feature_checksum(spec, parts.pool, wakeup),
    )
    bounds = Bounds(vocab_size=parts.model.vocab_size, context_length=config.context_length, vision=parts.model.vision)
    return EncodeRole(
        scheduler=scheduler,
        manager=manager,
        server=FeatureServer(scheduler=scheduler, manager=manager, pages=pages, bounds=bounds),
        metadata=metadata,
        page_bytes=parts.pool.page_bytes,
        source=KVSource(manager.control_address, manager.incarnation),
    )


def feature_fetches(
    spec: SchedulerSpec, parts: EngineParts, pool: KVPool, *, wakeup: Callable[[], None]
) -> FeatureFetches:
    """Raises BackendUnavailable."""
    parts.weights.number()
    metadata = MetadataBuffers(MAX_FETCHES, weights=parts.weights.number)
    args = feature_args(spec, pool, metadata, parts.model, dtype=parts.config.dtype)
    config = transfer_config(spec)
    manager = DecodeManager(
        args,
        engine_of(spec, pool),
        replace(config, handshake_timeout_s=HANDSHAKE_S),
        lookup=no_lookup,
    )
    start(manager, wakeup)
    return FeatureFetches(
        memory=parts.scheduler.memory,
        manager=manager,
        metadata=metadata,
        allocator=PageAllocator(num_pages=pool.num_pages, page_size=pool.page_size),
        rooms=rooms_of(manager.incarnation),
        timeout_s=FETCH_TIMEOUT_S,
        checksum=feature_checksum(spec, pool, wakeup),
    )


def feature_args(
    spec: SchedulerSpec, pool: KVPool, metadata: MetadataBuffers, model: ModelConfig, *, dtype: str
) -> KVArgs:
    return KVArgs(
        kv=memory_of(_alone(pool)).kv,
        aux=metadata.region,
        signature=feature_signature(model),
        page_size=pool.page_size,
        dtype=dtype,
        kv_checksum=CHECKSUM_NAME if spec.disagg.disaggregation_kv_checksum else "off",
    )


def feature_signature(model: ModelConfig) -> str:
    """Return the name of a feature computation; weights are compared separately."""
    digest = hashlib.sha256(repr(model.vision).encode()).hexdigest()[:16]
    return f"features of images for {model.architecture}, {model.hidden_size} a level, tower {digest}"


def feature_checksum(spec: SchedulerSpec, pool: KVPool, wakeup: Callable[[], None]) -> Checksum | None:
    if not spec.disagg.disaggregation_kv_checksum:
        return None
    return alone(RankChecksum(_alone(pool), wakeup=wakeup))


def _alone(pool: KVPool) -> RankPools:
    return RankPools(kv=pool, held=pool.held)
