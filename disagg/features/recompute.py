"""Prompts that decode workers' requests retracted, computed again by a prefill worker.

Their hand-overs are among the role's own: the pages are known from the start, and no client waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from disagg.outgoing import HandoverStage, Outgoing, PrefillHandover, Purpose, Senders
from disagg.role import PeerPart
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.images import KEY_BYTES, ImageInput, positions_taken
from engine.messages import FinishReason, GenerateRequest
from engine.model_files.tower_config import CHANNELS, ClipTower
from engine.model_files.vision_config import VisionConfig
from engine.sampling_params import SamplingParams
from transfer_backends.contract import NO_PREFIXES, RecomputeRequest, Work
from transfer_backends.wire import MAX_IMAGE_BYTES

# ---- Decode's recompute request (disagg/features/resumption.py) as a prefill engine's request. Pure.

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
    """An error if this engine cannot compute the work."""
    if work.variant:
        return "prompts of adapters are computed where they are"
    if len(work.tokens) > bounds.context_length:
        return f"{len(work.tokens)} tokens exceed the context of {bounds.context_length}"
    if not (work.tokens and min(work.tokens) >= 0 and max(work.tokens) < bounds.vocab_size):
        return f"token ids must be between 0 and {bounds.vocab_size - 1}"
    return None


def request_for(wanted: RecomputeRequest, now_s: float, images: tuple[ImageInput, ...] = ()) -> Request:
    """It ends with its KV computed; its sample is dropped."""
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


# ---- recomputation


class Recomputes(PeerPart):
    """Takes peers' requests for prompts. As the last part, it refuses all others' for prefixes."""

    def __init__(self, *, scheduler: Scheduler, manager: Senders, prompts: Outgoing, bounds: Bounds) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._prompts = prompts
        self._bounds = bounds
        self._num_refused = 0
        self._closed: str | None = None

    def take(self, wanted: RecomputeRequest, now_s: float) -> bool:
        images, unseen = self._images_of(wanted.work)
        request = request_for(wanted, now_s, images)
        sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
        handover = PrefillHandover(request, wanted.room, moves_bytes=True, sender=sender, purpose=Purpose.RECOMPUTE)
        self._prompts.open(handover)
        unfit = self._scheduler.refusal(request)
        error = self._closed or unseen or why_not(wanted.work, self._bounds) or (unfit and unfit.message)
        if wanted.work.cached:
            error = NO_PREFIXES
        if error:
            self._num_refused += 1
            self._prompts.refuse(handover, error)
        return True

    def _images_of(self, work: Work) -> tuple[tuple[ImageInput, ...], str]:
        try:
            return images_of(work, self._bounds), ""
        except ValueError as error:
            return (), str(error)

    def close_to_peers(self, why: str | None) -> None:
        self._closed = why

    def end_peers_work(self, why: str) -> None:
        reason = FinishReason(kind="abort", message=why)
        for handover in list(self._prompts.handovers.values()):
            if not handover.for_prompt and handover.stage is not HandoverStage.ENDING:
                self._num_refused += 1
                self._prompts.abort(handover, reason)

    def counters(self) -> dict[str, float]:
        return {"recompute_refused": self._num_refused}
