"""Image features fetched from encode workers for waiting prompts.

  begin -> a transfer --landed--> image cache: a step copies them, then frees the pages
     +---- failed, late, no room: the prompts encode the image in their steps

Prompts with the same image share a fetch. Images with cached KV need none.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from disagg.features.prefix_fetching import fits_weights
from disagg.features.recompute import fits, packed
from disagg.incoming import Incoming, IncomingTransfer, Receivers, TransferFailure
from disagg.metadata import FirstToken, MetadataBuffers
from disagg.role import PeerPart
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.memory import Detached, Memory
from engine.core.request import Request
from engine.images import ImageInput
from engine.messages import FeatureSource, FinishReason, TokenOutput
from transfer_backends.contract import Route, Work
from transfer_backends.sides import RoomInUse

log = logging.getLogger(__name__)

MAX_FETCHES = 256  # at a time; more are encoded here
ATTEMPT = 1  # attempt 0 is a router's request
COUNTED = (
    *("feature_fetches", "features_fetched", "feature_fetched_tokens"),
    *(f"feature_fetches_{end}" for end in ("forgone", "refused", "late", "aborted")),
)
AVOIDED_S = 5.0  # time without requests for encoders that were late, failed or refused


@dataclass(slots=True, eq=False, kw_only=True)
class FeatureFetch(IncomingTransfer):
    """A fetch by image key from encoder `control`, for `waiting` prompts by rid."""

    image: ImageInput
    control: str
    waiting: dict[str, Request] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class FeatureFetches(PeerPart):
    """Owns feature pages until a step copied them, or no peer writes them.

    `allocator`: of the feature pool. `rooms`: globally unique. `timeout_s`: of a prompt's wait.
    """

    memory: Memory
    manager: Receivers
    metadata: MetadataBuffers
    allocator: PageAllocator
    rooms: Iterator[int]
    timeout_s: float

    def __post_init__(self) -> None:
        images = self.memory.part(ImageCache)
        assert images is not None, "the model sees images"
        self._images = images
        late = f"they did not come within {self.timeout_s:g} s"
        self.incoming = Incoming[FeatureFetch](self.metadata, self, late=late)
        self._landed: list[list[int]] = []  # pages owned by the image cache
        self._avoided: dict[str, float] = {}  # control address -> end time
        self._counters = self.incoming.counters
        self._counters |= dict.fromkeys(COUNTED, 0)

    def begin(self, request: Request, now_s: float) -> None:
        """Make `request` wait for its images' features from encoders."""
        if not request.message.encoders:
            return
        cached = len(self.memory.match_prefix(request).pages) * self.memory.allocator.page_size
        for image, source in zip(request.images, request.message.encoders, strict=False):
            if source is not None and image.end > cached and not self._images.has(image.key):
                self._wait(request, image, source, now_s)

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        """Remove a request; unneeded fetches end."""
        for fetch in list(self.incoming.transfers.values()):
            request = fetch.waiting.pop(rid, None)
            if request is not None:
                request.vision.num_arriving -= 1
                if not fetch.waiting:
                    self.incoming.cancel(fetch, "the client has gone")
        return None

    def end_peers_work(self, why: str) -> None:
        self.incoming.end_all(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._avoided = {control: until_s for control, until_s in self._avoided.items() if until_s > now_s}
        self._free_copied()
        self.incoming.poll(now_s)
        return []

    # ---- the beginning

    def _wait(self, request: Request, image: ImageInput, source: FeatureSource, now_s: float) -> None:
        fetch = self.incoming.transfers.get(image.key.hex()) or self._open(image, source, now_s)
        if fetch is not None and request.rid not in fetch.waiting:  # an image may repeat
            fetch.waiting[request.rid] = request
            request.vision.num_arriving += 1

    def _open(self, image: ImageInput, source: FeatureSource, now_s: float) -> FeatureFetch | None:
        is_large = self.allocator.pages_for(image.num_tokens) > self.allocator.num_pages or not fits((image,))
        is_avoided = now_s < self._avoided.get(source.control, now_s)
        if is_large or is_avoided or len(self.incoming.transfers) >= MAX_FETCHES:
            self._counters["feature_fetches_forgone"] += 1
            return None
        room, route = next(self.rooms), Route(control=source.control, incarnation=source.incarnation, shared=True)
        try:
            receiver = self.manager.receiver(room, bootstrap="", room_attempt=ATTEMPT, route=route)
        except (RoomInUse, ValueError):  # named by an incompatible router
            self._counters["feature_fetches_forgone"] += 1
            return None
        fetch = FeatureFetch(
            key=image.key.hex(),
            room=room,
            receiver=receiver,
            image=image,
            control=source.control,
            deadline_s=now_s + self.timeout_s,
        )
        self.incoming.begin(fetch)
        self._counters["feature_fetches"] += 1
        return fetch

    # ---- as the target of its transfers

    def reserve(self, ready: Sequence[FeatureFetch]) -> None:
        """Pages, a row and pixels go to encoders, or later if none is free."""
        for fetch in ready:
            if self.incoming.now_s < fetch.deadline_s and self.incoming.reserve(fetch, partial(self._allocate, fetch)):
                alone = msgspec.structs.replace(fetch.image, start=0)
                work = Work(tokens=[0] * alone.num_tokens, images=packed((alone,)))
                self.incoming.provide(fetch, fetch.pages, work=work)

    def _allocate(self, fetch: FeatureFetch) -> bool:
        count = self.allocator.pages_for(fetch.image.num_tokens)
        if count > self.allocator.num_free:
            return False
        fetch.pages = self.allocator.allocate(count)
        return True

    def landed(self, fetch: FeatureFetch, first: FirstToken) -> str:
        if not fits_weights(first):
            return "the encode worker computes with other weights"
        pages = list(fetch.pages)
        if self._images.land(fetch.image, pages):
            self._landed.append(pages)
            self._counters["features_fetched"] += 1
            self._counters["feature_fetched_tokens"] += fetch.image.num_tokens
        else:
            self.allocator.free(pages)
            self._counters["feature_fetches_aborted"] += 1
        self._end_wait(fetch)
        return ""

    def detach(self, fetch: FeatureFetch) -> Detached:
        pages, fetch.pages = list(fetch.pages), ()
        self.allocator.quarantine(pages)
        return Detached(pages)

    def free_detached(self, detached: Detached) -> None:
        self.allocator.end_quarantine(detached.pages)

    def failed(self, fetch: FeatureFetch, failure: TransferFailure, reason: str) -> None:
        """Waiting prompts encode the image; its encoder is avoided for a while."""
        lacked_pages = fetch.reached and fetch.metadata_row is None
        if failure is not TransferFailure.ABORTED and not (failure is TransferFailure.LATE and lacked_pages):
            self._avoided[fetch.control] = self.incoming.now_s + AVOIDED_S
        if failure is TransferFailure.CORRUPT:
            log.error("features of an image (room %d): %s", fetch.room, reason)
        self._counters[f"feature_fetches_{failure.counted}"] += 1
        log.debug("an image (room %d) is encoded here: %s", fetch.room, reason)
        self.allocator.free(fetch.pages)
        self._end_wait(fetch)

    def _end_wait(self, fetch: FeatureFetch) -> None:
        for request in fetch.waiting.values():
            request.vision.num_arriving -= 1

    def _free_copied(self) -> None:
        for pages in self._images.take_copied():
            self._landed.remove(pages)
            self.allocator.free(pages)

    # ---- reports

    def state(self) -> dict[str, Any]:
        """Report avoided encoders, so that routers choose others."""
        return {"avoided_encoders": list(self._avoided)}

    def waits_for_outside(self) -> bool:
        return bool(self.incoming.transfers or self.incoming.quarantined)

    def queues(self) -> dict[str, int]:
        incoming = self.incoming
        return {"fetching_features": len(incoming.transfers), "quarantined_features": len(incoming.quarantined)}

    def counters(self) -> Mapping[str, float]:
        return {**self.manager.counters, **self._counters}

    def check(self) -> None:
        counts, fetches = self.allocator.counts(), list(self.incoming.transfers.values())
        held = sum(len(fetch.pages) for fetch in fetches) + sum(map(len, self._landed))
        assert held == counts["held"], f"{counts['held']} pages of features are held, {held} have an owner"
        exposed = sum(len(fetch.detached.pages) for fetch in self.incoming.quarantined)
        assert exposed == counts["quarantined"], (
            f"{counts['quarantined']} pages of features in quarantine, not {exposed}"
        )
        for fetch in fetches:
            gone = [r.rid for r in fetch.waiting.values() if r.finish is None and not r.vision.num_arriving]
            assert fetch.waiting and not gone, f"fetches without a waiting request: {gone}"
        owned, used = self.incoming.num_rows, self.metadata.num_used
        assert owned == used, f"{used} rows used, {owned} owned"
        self.metadata.check()
        self.allocator.check()
        self.incoming.check()
        self.manager.check()

    def close(self) -> None:
        self.manager.close()
