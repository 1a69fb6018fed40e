"""Features of images that a worker gets from encode workers, for prompts that wait for them.

    begin -> WAITING --handshake, pages--> TRANSFER --Success--> the image cache: a step copies them, and the pages are free
                 \\________ Failed, too late, no room: the prompts go on, and their steps encode the image _______/
                                   |
                pages that the encoder may still write: quarantined until the receiver is drained

Prompts with the same image wait for one fetch. An image whose KV is cached here needs no features.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from disagg.handover import HandoverStage, Receivers
from disagg.metadata import Checksum, FirstToken, KVCorrupt, MetadataBuffers, MetadataCorrupt, PendingChecksum, verified
from disagg.prefix_fetching import fits_weights
from disagg.recompute import fits, packed
from engine.core.image_cache import ImageCache
from engine.core.memory import Memory
from engine.core.page_allocator import PageAllocator
from engine.core.request import Request
from engine.images import ImageInput
from engine.messages import FeatureSource
from transfer_backends.contract import Route, Work
from transfer_backends.kvpoll import KVPoll, RoomInUse
from transfer_backends.ports import KVReceiver

log = logging.getLogger(__name__)

MOST_FETCHES = 256  # at a time; more images than that are encoded here meanwhile
ATTEMPT = 1  # attempt 0 has a request of a router
AVOIDED_S = 5.0  # an encoder that was late, failed or refused: other prompts do not wait for it meanwhile


@dataclass(slots=True, eq=False, kw_only=True)
class FeatureFetch:
    """`waiting`: prompts that get the features, by rid. `until_s`: then it is too late."""

    image: ImageInput
    source: FeatureSource
    room: int
    receiver: KVReceiver
    until_s: float
    stage: HandoverStage = HandoverStage.WAITING
    pages: list[int] = field(default_factory=list)
    row: int | None = None
    checksum: PendingChecksum | None = None
    waiting: dict[str, Request] = field(default_factory=dict)


class FeatureFetches:
    """Owns the pages in which features arrive: from `begin` until a step has copied them, or no peer writes them any more."""

    def __init__(
        self,
        *,
        memory: Memory,
        manager: Receivers,
        metadata: MetadataBuffers,
        allocator: PageAllocator,
        rooms: Iterator[int],
        timeout_s: float,
        checksum: Checksum | None = None,
    ) -> None:
        """`allocator`: of the pool in which features arrive. `rooms`: numbers that no other worker has. `timeout_s`: of a prompt's wait."""
        assert memory.images is not None, "the model sees images"
        self._memory = memory
        self._images: ImageCache = memory.images
        self._manager = manager
        self._metadata = metadata
        self._allocator = allocator
        self._rooms = rooms
        self._timeout_s = timeout_s
        self._checksum = checksum
        self._fetches: dict[bytes, FeatureFetch] = {}  # by the image's key, in order of their beginning
        self._landed: list[list[int]] = []  # pages that the image cache has
        self._exposed: list[FeatureFetch] = []  # ended; the encoder may still write their pages
        self._avoided: dict[str, float] = {}  # control addresses, and until when
        self.counters: Counter[str] = Counter()

    def begin(self, request: Request, now_s: float) -> None:
        """Have `request` wait for the features of its images that an encoder computes."""
        cached = len(self._memory.match_prefix(request).pages) * self._memory.allocator.page_size
        for image, source in zip(request.images, request.encoders, strict=False):
            if source is not None and image.end > cached and not self._images.has(image.key):
                self._wait(request, image, source, now_s)

    def leave(self, rid: str) -> None:
        """The client of request `rid` is gone. Fetches for it alone end."""
        for fetch in list(self._fetches.values()):
            request = fetch.waiting.pop(rid, None)
            if request is not None:
                request.features_arriving -= 1
                if not fetch.waiting:
                    self._end(fetch, "aborted", "the client has gone")

    def poll(self, now_s: float) -> None:
        self._avoided = {control: until_s for control, until_s in self._avoided.items() if until_s > now_s}
        self._free_copied()
        self._end_drained()
        for fetch in list(self._fetches.values()):
            self._move(fetch, now_s)

    def end_all(self, why: str) -> None:
        for fetch in list(self._fetches.values()):
            self._end(fetch, "aborted", why)

    # ---- the beginning

    def _wait(self, request: Request, image: ImageInput, source: FeatureSource, now_s: float) -> None:
        fetch = self._fetches.get(image.key) or self._open(image, source, now_s)
        if fetch is not None and request.rid not in fetch.waiting:  # an image may come twice
            fetch.waiting[request.rid] = request
            request.features_arriving += 1

    def _open(self, image: ImageInput, source: FeatureSource, now_s: float) -> FeatureFetch | None:
        is_large = self._allocator.pages_for(image.num_tokens) > self._allocator.num_pages or not fits((image,))
        is_avoided = now_s < self._avoided.get(source.control, now_s)
        if is_large or is_avoided or len(self._fetches) >= MOST_FETCHES:
            self.counters["feature_fetches_forgone"] += 1
            return None
        room, route = next(self._rooms), Route(control=source.control, incarnation=source.incarnation, shared=True)
        try:
            receiver = self._manager.receiver(room, bootstrap="", room_attempt=ATTEMPT, route=route)
        except (RoomInUse, ValueError):  # a router of another make named it
            self.counters["feature_fetches_forgone"] += 1
            return None
        fetch = FeatureFetch(image=image, source=source, room=room, receiver=receiver, until_s=now_s + self._timeout_s)
        self._fetches[image.key] = fetch
        self.counters["feature_fetches"] += 1
        return fetch

    # ---- moves

    def _move(self, fetch: FeatureFetch, now_s: float) -> None:
        state = fetch.receiver.poll()
        waits_for_pages = state is KVPoll.WaitingForInput and fetch.stage is HandoverStage.WAITING
        if state is KVPoll.Failed:
            self._fail(fetch, fetch.receiver.failure() or "the transfer failed", now_s)
        elif fetch.stage is HandoverStage.TRANSFER and state is KVPoll.Success:
            self._land(fetch, now_s)
        elif now_s >= fetch.until_s:
            if not waits_for_pages:
                self._avoid(fetch, now_s)
            self._end(fetch, "late", f"they did not come within {self._timeout_s:g} s")
        elif waits_for_pages:
            self._give(fetch)

    def _fail(self, fetch: FeatureFetch, reason: str, now_s: float) -> None:
        self._avoid(fetch, now_s)
        self._end(fetch, "refused", reason)

    def _avoid(self, fetch: FeatureFetch, now_s: float) -> None:
        """Whatever an encoder refused one image for, the next may fare no better."""
        self._avoided[fetch.source.control] = now_s + AVOIDED_S

    def _give(self, fetch: FeatureFetch) -> None:
        """Name pages and a row to the encoder, with the pixels; where others have them all, later."""
        count = self._allocator.pages_for(fetch.image.num_tokens)
        if count > self._allocator.num_free or (row := self._metadata.allocate()) is None:
            return
        fetch.pages, fetch.row, fetch.stage = self._allocator.allocate(count), row, HandoverStage.TRANSFER
        alone = _alone(fetch.image)
        work = Work(tokens=[0] * alone.num_tokens, images=packed((alone,)))
        fetch.receiver.provide(fetch.pages, row, work=work)

    def _land(self, fetch: FeatureFetch, now_s: float) -> None:
        try:
            first = self._read_row(fetch)
        except (MetadataCorrupt, KVCorrupt) as error:
            log.error("features of an image (room %d): %s", fetch.room, error)
            self.counters["kv_checksum_failed"] += isinstance(error, KVCorrupt)
            self._fail(fetch, str(error), now_s)
            return
        if first is None:
            return
        if not fits_weights(first):
            self._fail(fetch, "the encode worker computes with other weights", now_s)
            return
        self.counters["kv_checksum_verified"] += self._checksum is not None
        if self._images.land(fetch.image, fetch.pages):
            self._landed.append(fetch.pages)
            self.counters["features_fetched"] += 1
            self.counters["feature_fetched_tokens"] += fetch.image.num_tokens
        else:
            self._allocator.free(fetch.pages)
            self.counters["feature_fetches_aborted"] += 1
        self._forget(fetch)
        self._close(fetch)

    def _read_row(self, fetch: FeatureFetch) -> FirstToken | None:
        """None: ask again. Raises MetadataCorrupt and KVCorrupt."""
        assert fetch.row is not None
        first = self._metadata.read(fetch.row, room=fetch.room)
        if self._checksum is not None:
            fetch.checksum = fetch.checksum or self._checksum(fetch.pages, (), None)
            return verified(first, fetch.checksum, num_pages=len(fetch.pages))
        return first

    def _end(self, fetch: FeatureFetch, how: str, reason: str) -> None:
        """Let those that wait encode it. Pages go back at once, or once no peer writes them."""
        self.counters[f"feature_fetches_{how}"] += 1
        log.debug("an image (room %d) is encoded here: %s", fetch.room, reason)
        fetch.receiver.abort(reason)
        self._forget(fetch)
        if fetch.receiver.drained():
            self._allocator.free(fetch.pages)
            self._close(fetch)
        else:
            self._allocator.quarantine(fetch.pages)
            self._exposed.append(fetch)

    def _forget(self, fetch: FeatureFetch) -> None:
        del self._fetches[fetch.image.key]
        for request in fetch.waiting.values():
            request.features_arriving -= 1

    # ---- pages that come back

    def _close(self, fetch: FeatureFetch) -> None:
        if fetch.row is not None:
            self._metadata.free(fetch.row)
        fetch.receiver.close()

    def _free_copied(self) -> None:
        for pages in self._images.take_copied():
            self._landed.remove(pages)
            self._allocator.free(pages)

    def _end_drained(self) -> None:
        drained = [fetch for fetch in self._exposed if fetch.receiver.drained()]
        if not drained:
            return
        self._exposed = [fetch for fetch in self._exposed if fetch not in drained]
        for fetch in drained:
            self._allocator.end_quarantine(fetch.pages)
            self._close(fetch)

    # ---- reports

    def avoided(self) -> list[str]:
        """Return the control addresses of encoders that are not asked at present: a router names others."""
        return list(self._avoided)

    @property
    def waits_for_outside(self) -> bool:
        return bool(self._fetches or self._exposed)

    @property
    def num_rows(self) -> int:
        return sum(fetch.row is not None for fetch in (*self._fetches.values(), *self._exposed))

    def queues(self) -> dict[str, int]:
        return {"fetching_features": len(self._fetches), "quarantined_features": len(self._exposed)}

    def check(self) -> None:
        counts = self._allocator.counts()
        held = sum(len(fetch.pages) for fetch in self._fetches.values()) + sum(map(len, self._landed))
        assert held == counts["held"], f"{counts['held']} pages of features are held, {held} have an owner"
        exposed = sum(len(fetch.pages) for fetch in self._exposed)
        assert exposed == counts["quarantined"], (
            f"{counts['quarantined']} pages of features in quarantine, not {exposed}"
        )
        for fetch in self._fetches.values():
            gone = [r.rid for r in fetch.waiting.values() if r.finish is None and not r.features_arriving]
            assert fetch.waiting and not gone, f"fetches without a waiting request: {gone}"
        assert self.num_rows == self._metadata.num_used, f"{self._metadata.num_used} rows used, {self.num_rows} owned"
        self._metadata.check()
        self._allocator.check()
        self._manager.check()

    def close(self) -> None:
        self._manager.close()


def _alone(image: ImageInput) -> ImageInput:
    """The image of a prompt that has nothing else."""
    return msgspec.structs.replace(image, start=0)


def rooms_of(incarnation: str) -> Iterator[int]:
    """Yield numbers of rooms, 1..2**63 - 1, that those of other incarnations are not."""
    number = 0
    while True:
        digest = hashlib.sha256(f"{incarnation}/{number}".encode()).digest()
        yield int.from_bytes(digest[:8], "little") >> 1 | 1
        number += 1
