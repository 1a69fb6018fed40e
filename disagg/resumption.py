r"""Retracted decode requests whose KV a prefill worker recomputes.

    retracted --> a transfer --landed--> running: its next step is a usual one
                    \__ failed, no worker, almost all still cached: this engine computes it

Prefill computes all known tokens but the last, without sampling, so that a normal step continues
seeds, penalties, grammar and logprobs. Cached pages are neither computed nor sent. The room is the
request's, the attempt its number of retractions (the router's is 0).
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from disagg.incoming import Receivers, RequestTarget, RequestTransfer, TransferFailure, TransferStage
from disagg.metadata import Checksum, FirstToken, MetadataBuffers
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.images import KEY_BYTES, ImageInput, positions_taken
from engine.messages import FAKE_BOOTSTRAP_HOST, GenerateRequest
from engine.model_files.tower_config import CHANNELS, ClipTower
from engine.model_files.vision_config import VisionConfig
from engine.sampling_params import SamplingParams
from transfer_backends.contract import RecomputeRequest, Work
from transfer_backends.rooms import RoomInUse
from transfer_backends.wire import MAX_IMAGE_BYTES

# ---- Decode's recompute request (disagg/resumption.py) as a prefill engine's request. Pure.

NOTHING = SamplingParams(temperature=0.0, max_new_tokens=0)
DESCRIPTION_BYTES = 256  # maximum per image without pixels

_images = msgspec.msgpack.Decoder(tuple[ImageInput, ...])


@dataclass(frozen=True, slots=True)
class Bounds:
    vocab_size: int
    context_length: int
    vision: VisionConfig | None = None


def fits(images: Sequence[ImageInput]) -> bool:
    return sum(len(image.pixels) + DESCRIPTION_BYTES for image in images) <= MAX_IMAGE_BYTES


def packed(images: Sequence[ImageInput]) -> bytes:
    return msgspec.msgpack.encode(images) if images else b""


def images_of(work: Work, bounds: Bounds) -> tuple[ImageInput, ...]:
    """Raises ValueError if the model cannot use the images."""
    if not work.images:
        return ()
    if bounds.vision is None:
        raise ValueError("images, and this model sees none")
    try:
        images = _images.decode(work.images)
    except msgspec.MsgspecError as error:
        raise ValueError(f"images: {error}") from None
    last = 0
    for image in images:
        if not (last <= image.start < image.end <= len(work.tokens)):
            raise ValueError(f"images: one at {image.start}..{image.end} of {len(work.tokens)} tokens, behind {last}")
        if not _is_whole(image, bounds.vision):
            raise ValueError(f"images: the one at {image.start} has other sizes than its tokens")
        last = image.end
    if positions_taken(len(work.tokens), images) > bounds.context_length:
        raise ValueError(f"images: their time exceeds the context of {bounds.context_length}")
    return images


def _is_whole(image: ImageInput, vision: VisionConfig) -> bool:
    sizes = (*image.grid, *image.size, image.merge, image.time_step)
    if min(sizes) < 1 or len(image.key) != KEY_BYTES or len(image.pixels) != prod(image.size) * CHANNELS:
        return False
    tower, frames = vision.tower, image.size[0]
    if isinstance(tower, ClipTower):
        side = tower.side * tower.patch
        return image.num_tokens == tower.num_tokens and image.size == (1, side, side)
    time, rows, columns = image.grid
    in_patches = -(-frames // tower.temporal_patch) == time and image.size[1:] == (
        rows * tower.patch,
        columns * tower.patch,
    )
    in_tokens = rows % tower.merge == columns % tower.merge == 0 and image.merge == tower.merge
    return in_patches and in_tokens and image.num_tokens == vision.num_tokens(image.grid)


def why_not(work: Work, bounds: Bounds) -> str | None:
    """Return an error if this engine cannot compute the work."""
    if len(work.tokens) > bounds.context_length:
        return f"{len(work.tokens)} tokens exceed the context of {bounds.context_length}"
    if not (work.tokens and min(work.tokens) >= 0 and max(work.tokens) < bounds.vocab_size):
        return f"token ids must be between 0 and {bounds.vocab_size - 1}"
    return None


def request_for(wanted: RecomputeRequest, now_s: float, images: tuple[ImageInput, ...] = ()) -> Request:
    """Return a request that ends with its KV computed; its sample is dropped."""
    return Request(
        message=GenerateRequest(
            rid=f"recompute-{wanted.room}-{wanted.room_attempt}",
            input_ids=list(wanted.work.tokens),
            sampling=NOTHING,
            priority=wanted.work.priority,
            namespace=wanted.work.namespace,
            images=list(images),
        ),
        arrived_s=now_s,
        prefill_only=True,
        keep_kv=wanted.work.share,
    )


# ---- resumption

log = logging.getLogger(__name__)


class Resumption(RequestTarget[RequestTransfer]):
    """Owner of requests until they run, wait for this engine, or end."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        moves_bytes: bool,
        checksum: Checksum | None = None,
    ) -> None:
        super().__init__(scheduler, metadata, checksum=checksum)
        self._manager = manager
        self.counters = self.incoming.counters
        self.counters |= {"recompute_failed": 0, "resumed_through_prefill": 0}
        self._moves_bytes = moves_bytes
        self._may_preempt = False

    def take(self) -> None:
        for request in self._scheduler.held.take_retracted():
            if not self._begin(request):
                self._scheduler.held.resume_here(request)

    def _begin(self, request: Request) -> bool:
        at = request.message.bootstrap
        if at is None or at.host == FAKE_BOOTSTRAP_HOST or not fits(request.images):
            return False
        try:
            receiver = self._manager.receiver(
                at.room, bootstrap=f"{at.host}:{at.port}", room_attempt=request.stats.retractions
            )
        except RoomInUse:  # a client reused the room
            self.counters["recompute_failed"] += 1
            return False
        self.incoming.begin(
            RequestTransfer(
                key=request.rid, room=at.room, receiver=receiver, request=request, moves_bytes=self._moves_bytes
            )
        )
        return True

    def poll(self, now_s: float, *, may_preempt: bool) -> None:
        self._may_preempt = may_preempt
        self.incoming.poll(now_s)

    def waiting(self) -> list[Request]:
        """Requests that wait for memory, ahead of new ones that are not more urgent."""
        return [t.request for t in self.incoming.transfers.values() if t.stage is TransferStage.WAITING]

    # ---- as the target of its transfers

    def reserve(self, ready: Sequence[RequestTransfer]) -> None:
        """Reserve memory by urgency, after equally urgent requests computed here."""
        now_s, urgency = self.incoming.now_s, self._scheduler.limits.priorities.urgency
        computed = max((urgency(r, now_s) for r in self._scheduler.stages.retracted()), default=-math.inf)
        for transfer in sorted(ready, key=lambda t: (-urgency(t.request, now_s), t.request.serial)):
            if urgency(transfer.request, now_s) <= computed or not self._request(transfer):
                return

    def _request(self, transfer: RequestTransfer) -> bool:
        request, memory, held = transfer.request, self._scheduler.memory, self._scheduler.held
        if not self.incoming.reserve(transfer, lambda: held.reserve(request, may_preempt=self._may_preempt)):
            return False
        if request.num_tokens - request.computed_len <= memory.allocator.page_size:  # one small step of our own
            self.incoming.cancel(transfer, "almost all of it is still cached")
            return False
        known = request.tokens(0, request.num_tokens - 1)
        work = Work(
            tokens=known,
            priority=request.message.priority,
            share=request.keep_kv,
            namespace=request.message.namespace,
            images=packed(request.images),
        )
        self.provide_tokens(transfer, len(known), work=work)
        return True

    def landed(self, transfer: RequestTransfer, first: FirstToken) -> str:
        if first.result.bad or (self._moves_bytes and first.result.token is not None):
            return "prefill computed NaN, or sampled a token, which was not requested"
        transfer.take_over(first)
        self.counters["resumed_through_prefill"] += 1
        self._scheduler.held.resume_decoding(transfer.request)
        return ""

    def failed(self, transfer: RequestTransfer, failure: TransferFailure, reason: str) -> None:
        """Compute the KV here, unnoticed by the client."""
        request = transfer.request
        if request.finish is not None:
            return self._scheduler.held.release(request)
        if failure is not TransferFailure.ABORTED:
            self.counters["recompute_failed"] += 1
            message = "decode %s (room %d): prefill did not compute it again: %s"
            log.warning(message, transfer.key, transfer.room, reason, extra=transfer.log_fields)
        self._scheduler.held.resume_here(request)
