"""Image features on the device: encoding in prefill steps, and eviction.

  needed by a step --encodes--> used --last token computed--> unused --room needed--> forgotten
           ^____________ needed again by any request ___________/
  sent by an encode worker --lands--------------------------> unused

Steps need whole features of every image they touch. Used and unused ones share a limit in bytes;
the least recently needed unused ones are evicted. Repeated images are encoded once.

Steps end before an image without room or encode budget. Requests with a chunk that cannot fit are
refused.

After SGLang's and vLLM's embedding caches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import replace

from engine.core.mem_cache.memory_part import Features, MemoryPart
from engine.core.outputs import refusal
from engine.core.plan import FeatureLand, FeatureRows, ItemImages, Phase, Plan, PlanItem
from engine.core.request import Request
from engine.images import ImageInput, rope_positions
from engine.messages import FinishReason

MEGABYTE = 1 << 20

Use = tuple[int, int]  # request serial, image number


@dataclass(slots=True, eq=False)
class _Features:
    size_bytes: int
    uses: set[Use] = field(default_factory=set)


class ImageCache(MemoryPart, Features):
    """Features up to `max_bytes`, with `token_bytes` per token."""

    name = "image cache"
    sees_images = True

    def __init__(self, *, max_bytes: int, token_bytes: int) -> None:
        assert max_bytes > 0 and token_bytes > 0
        self.max_bytes = max_bytes
        self.token_bytes = token_bytes
        self._features: dict[bytes, _Features] = {}  # by key; unused ones least recently needed first
        self._encodes: list[ImageInput] = []  # since the last plan
        self._forgets: list[bytes] = []
        self._lands: list[FeatureLand] = []
        self._copied: list[list[int]] = []  # landed pages that were copied, or never will be
        self._num_bytes = self._used_bytes = 0
        self.num_needed = self.num_hits = self.num_evicted = self.num_encoded = self.num_encoded_tokens = 0
        self.num_landed_tokens = 0

    # ---- what fits

    def max_at_once(self, request: Request, part: int) -> int:
        """Maximum bytes that any `part` tokens of the prompt need at once."""
        images = request.images
        return max((self._bytes_of(_from(images, first, image.end - 1 + part)) for first, image in enumerate(images)))

    def refusal(self, request: Request, *, part_tokens: int) -> FinishReason | None:
        most = self.max_at_once(request, part_tokens) if request.images else 0
        if most <= self.max_bytes:
            return None
        return refusal(
            f"images: {part_tokens} tokens of the prompt need features of {_megabytes(most)} at once, and there is room "
            f"for {_megabytes(self.max_bytes)} (--vlm-cache-size-mb of the worker); send smaller images",
            status=400,
        )

    def has_room(self, request: Request, part: int) -> bool:
        return self.max_at_once(request, part) <= self.max_bytes - self._used_bytes

    def may_go_on(self, request: Request, part: int) -> bool:
        start = request.launched_len
        return self._bytes_of(self._unused(_touched(request, start, start + part))) <= self._room

    def reach(self, request: Request, start: int, *, part: int, budget: float) -> tuple[int, float]:
        """Images cost their tokens; those of the first `part` tokens are encoded at any cost."""
        room, seen = self._room, set[bytes]()
        for image in _touched(request, start, request.num_tokens):
            if image.key in seen:
                continue
            features = self._features.get(image.key)
            size = 0 if features is not None and features.uses else image.num_tokens * self.token_bytes
            cost = 0 if features is not None else image.num_tokens
            if image.start >= start + part and (size > room or cost > budget - (image.start - start)):
                return image.start, budget
            seen.add(image.key)
            room, budget = room - size, budget - cost
        return request.num_tokens, budget

    @property
    def _room(self) -> int:
        return self.max_bytes - self._used_bytes

    def _unused(self, images: Iterable[ImageInput]) -> Iterator[ImageInput]:
        for image in images:
            features = self._features.get(image.key)
            if features is None or not features.uses:
                yield image

    def _bytes_of(self, images: Iterable[ImageInput]) -> int:
        return sum({image.key: image.num_tokens for image in images}.values()) * self.token_bytes

    # ---- uses

    def use(self, request: Request, start: int, end: int) -> int:
        before = self.num_encoded_tokens
        for number, image in enumerate(request.images):
            if image.end > start and image.start < end:
                self._use(image, (request.serial, number))
        self._make_room()
        return self.num_encoded_tokens - before

    def _use(self, image: ImageInput, use: Use) -> None:
        features = self._features.pop(image.key, None)
        if features is None or use not in features.uses:  # else an earlier chunk needed it, too
            self.num_needed += 1
            self.num_hits += features is not None
        features = features or self._encode(image)
        self._features[image.key] = features  # as the last one
        self._used_bytes += 0 if features.uses else features.size_bytes
        features.uses.add(use)

    def _encode(self, image: ImageInput) -> _Features:
        self._encodes.append(image)
        self.num_encoded += 1
        self.num_encoded_tokens += image.num_tokens
        features = _Features(image.num_tokens * self.token_bytes)
        self._num_bytes += features.size_bytes
        return features

    def _make_room(self) -> None:
        while self._num_bytes > self.max_bytes:
            key = next(key for key, features in self._features.items() if not features.uses)
            self._forget(key)
            self.num_evicted += 1

    def retire(self, request: Request) -> None:
        for image in islice(request.images, request.vision.num_seen, None):
            if image.end > request.computed_len:
                return
            self._end_use(request, request.vision.num_seen)
            request.vision.num_seen += 1

    def free(self, request: Request) -> None:
        for number in range(request.vision.num_seen, len(request.images)):
            self._end_use(request, number)
        request.vision.num_seen = 0

    def _end_use(self, request: Request, number: int) -> None:
        features = self._features.get(request.images[number].key)
        if features is not None and (request.serial, number) in features.uses:
            features.uses.remove((request.serial, number))
            self._used_bytes -= 0 if features.uses else features.size_bytes

    def _forget(self, key: bytes) -> None:
        features = self._features.pop(key)
        self._num_bytes -= features.size_bytes
        self._used_bytes -= features.size_bytes if features.uses else 0
        if land := next((land for land in self._lands if land.key == key), None):  # unknown to steps
            self._lands.remove(land)
            self._copied.append(land.pages)
        else:
            self._forgets.append(key)

    # ---- features from elsewhere

    def has(self, key: bytes) -> bool:
        return key in self._features

    def land(self, image: ImageInput, pages: list[int]) -> bool:
        """Copy features from `pages` in the next step; False: already present, or no room."""
        size = image.num_tokens * self.token_bytes
        if image.key in self._features or size > self._room:
            return False
        self._features[image.key] = _Features(size)
        self._num_bytes += size
        self._lands.append(FeatureLand(image.key, pages, image.num_tokens))
        self.num_landed_tokens += image.num_tokens
        self._make_room()
        return True

    def take_copied(self) -> list[list[int]]:
        """Take pages that no step reads any longer."""
        copied, self._copied = self._copied, []
        return copied

    def forget(self, *, files: bool) -> None:
        """Forget features of other weights; none may be in use."""
        for key in list(self._features):
            assert not self._features[key].uses, "features are forgotten that a request has still to read"
            self._forget(key)

    # ---- steps

    def asks_for_a_step(self, phase: Phase | None) -> bool:
        return phase is not Phase.DECODE and bool(self._forgets or self._lands)

    def attach(self, plan: Plan) -> None:
        """Add requested work to this plan, unless it only decodes."""
        if plan.phase is Phase.DECODE:
            return
        plan.encodes, self._encodes = self._encodes, []
        plan.forgets, self._forgets = self._forgets, []
        plan.lands, self._lands = self._lands, []

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        """Note copied pages; forget features of a failed step, possibly unencoded."""
        self._copied += [land.pages for land in plan.lands]
        if not failed:
            return
        for key in (*(image.key for image in plan.encodes), *(land.key for land in plan.lands)):
            if key in self._features:
                self._forget(key)

    # ---- reports

    def counters(self) -> dict[str, float]:
        return {
            "mm_cache_queries": float(self.num_needed),
            "mm_encoded_images": float(self.num_encoded),
            "mm_encoded_tokens": float(self.num_encoded_tokens),
            "mm_cache_hits": float(self.num_hits),
            "mm_cache_evictions": float(self.num_evicted),
        }

    def gauges(self) -> dict[str, float]:
        return {
            "mm_cache_used_bytes": float(self._num_bytes),
            "mm_cache_total_bytes": float(self.max_bytes),
            "mm_cache_hit_rate": self.num_hits / self.num_needed if self.num_needed else 0.0,
        }

    def check(self, requests: Sequence[Request]) -> None:
        sizes = [features.size_bytes for features in self._features.values()]
        used = [features.size_bytes for features in self._features.values() if features.uses]
        assert (sum(sizes), sum(used)) == (self._num_bytes, self._used_bytes), "bytes of features are miscounted"
        assert self._num_bytes <= self.max_bytes, f"{self._num_bytes} bytes of features, room for {self.max_bytes}"
        assert not self._encodes, "an image to encode without a plan"
        assert all(land.key in self._features for land in self._lands), "features land that are forgotten"
        serials = {request.serial for request in requests}
        left = [use for features in self._features.values() for use in features.uses if use[0] not in serials]
        assert not left, f"features are used by requests that have ended: {left}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / MEGABYTE:.1f} MB"


def _touched(request: Request, start: int, end: int) -> Iterator[ImageInput]:
    for image in islice(request.images, request.vision.num_seen, None):
        if image.start >= end:
            return
        if image.end > start:
            yield image


def _from(images: Sequence[ImageInput], first: int, end: int) -> Iterator[ImageInput]:
    for image in islice(images, first, None):
        if image.start >= end:
            return
        yield image


# ---- Image data of plan items: feature rows instead of embeddings, and RoPE positions.


def with_images(item: PlanItem, request: Request) -> PlanItem:
    images, end = request.images, item.kv_len
    if item.start >= images[-1].end:
        delta = request.vision.rope_delta
        return replace(item, images=ItemImages(rope_delta=delta)) if delta else item
    begun = [image for image in images if image.start < end]
    if not begun:
        return item
    rope = rope_positions(images, item.start, end) if any(map(_turns, begun)) else None
    return replace(item, images=ItemImages(_rows_of(begun, item.start, end), rope))


def _turns(image: ImageInput) -> bool:
    _, rows, columns = image.grid
    return rows * columns > 1


def _rows_of(images: Sequence[ImageInput], start: int, end: int) -> tuple[FeatureRows, ...]:
    found = list[FeatureRows]()
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            found.append(FeatureRows(first - start, image.key, first - image.start, last - first))
    return tuple(found)
