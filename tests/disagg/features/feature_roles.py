"""An engine that serves whole requests and an encoder under their production roles: features come over the test's wire, in one thread."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.features.feature_fetching import FeatureFetches
from disagg.features.recompute import Bounds
from disagg.metadata import MetadataBuffers
from disagg.role import PartedRole
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.plan import ItemResult, Plan, StepResult
from engine.images import ImageInput
from engine.messages import FeatureSource, KVSource
from tests.core.hash_model import KV, NO_MEMORY, VOCAB, HashModel, Slot
from tests.core.mem_cache.images import SEES, prompt_of
from tests.disagg.two_roles import Engines, RoleEngine, assembly_of
from tests.disagg.wire_in_a_test import Ends, Wire

PAGE = 4
ROWS = 8
SOURCE = FeatureSource("127.0.0.1:1", "encoder")
SEEN = Bounds(vocab_size=VOCAB, context_length=10_000, vision=SEES)


class FeatureModel(HashModel):
    """An encoder's: what it writes into pages are features, each with the weights that it is of."""

    def run(self, plan: Plan) -> StepResult:
        self.last_seq = plan.seq
        for slot in plan.closes:
            del self.rows[slot]
        for opened in plan.opens:
            self.rows[opened.slot] = []
        for key in plan.forgets:
            self.features.pop(key, None)
        for item in plan.items:
            self.rows[item.slot] += item.new_pages
        failure = NO_MEMORY if self.fails(plan) or self._lacks_features(plan) else ""
        if not failure:
            self._encode(plan)
            self._write(plan)
        self.lost |= {item.slot for item in plan.items} if failure else set()
        return StepResult(plan.seq, [ItemResult(None) for _ in plan.items], failure=failure)

    def _write(self, plan: Plan) -> None:
        for item in plan.items:
            for part in () if item.images is None else item.images.rows:
                rows = self.features[part.key][part.first : part.first + part.count]
                for position, row in enumerate(rows, start=item.start + part.at):
                    page = self.rows[item.slot][position // self.page_size]
                    self.kv[page, position % self.page_size] = Slot(row, self.weights)


@dataclass
class ArrivingPages:
    """Where the wire writes: not the KV of the engine that fetches."""

    kv: KV
    page_size: int = PAGE
    last_seq: int = -1
    window: int = 0
    states: tuple[()] = ()


class EncodeCluster(Engines):
    """`pages`: of the encoder's features. `arriving`: in which they arrive. `weights`: of encoder and engine. `room`: as `image_room`."""

    def __init__(
        self,
        *,
        pages: int = 64,
        arriving: int = 16,
        room: int = 100,
        weights: tuple[int, int] = (0, 0),
        timeout_s: float = 10.0,
        depth: int = 1,
        **engine: object,
    ) -> None:
        self.encoder = RoleEngine(
            num_pages=pages, page_size=PAGE, chunk=None, max_running=4, depth=depth, image_room=room
        )
        self.encoder.model = FeatureModel(page_size=PAGE)
        self.encoder.model.image_room = room
        made = {"num_pages": 200, "chunk": 8, "max_running": 4, "depth": depth, "image_room": room, **engine}
        self.engine = RoleEngine(page_size=PAGE, **made)  # type: ignore[arg-type]
        self.encoder.model.weights, self.engine.model.weights = weights
        rows = (
            MetadataBuffers(ROWS, weights=lambda: self.encoder.model.weights),
            MetadataBuffers(ROWS, weights=lambda: self.engine.model.weights),
        )
        landing = ArrivingPages(self.engine.model.arrivals)
        self.wire = Wire(prefill=self.encoder.model, decode=landing, rows=rows)  # type: ignore[arg-type]
        source = KVSource(SOURCE.control, SOURCE.incarnation)
        self.gets = Ends.of(self.wire)
        self.encoder.role = assembly_of(self.encoder, rows[0]).encode(Ends.of(self.wire), source, SEEN)
        self.fetches = FeatureFetches(
            memory=self.engine.scheduler.memory,
            manager=self.gets,
            metadata=rows[1],
            allocator=PageAllocator(num_pages=arriving, page_size=PAGE),
            rooms=itertools.count(1),
            timeout_s=timeout_s,
        )
        self.engine.role = PartedRole(self.engine.scheduler, (self.fetches,))

    def ask(
        self,
        rid: str,
        *images: ImageInput,
        length: int = 20,
        new: int = 3,
        sources: Sequence[FeatureSource | None] | None = None,
        **wishes: object,
    ) -> None:
        named = tuple([SOURCE] * len(images) if sources is None else sources)
        prompt = prompt_of(*images, length=length)
        self.engine.submit(rid, prompt, 1, new=new, prefill_only=False, images=images, encoders=named, **wishes)

    @property
    def engines(self) -> Sequence[RoleEngine]:
        return self.encoder, self.engine

    @property
    def wires(self) -> Sequence[Wire]:
        return (self.wire,)

    def run(self, rng: random.Random | None = None, most: int = 30_000) -> None:
        super().run(rng or random.Random(1), most)

    def assert_all_back(self) -> None:
        self.engine.turn()  # pages that a step has copied return at the next poll
        super().assert_all_back()
        counts = self.fetches.allocator.counts()
        assert counts["free"] == self.fetches.allocator.num_pages, counts

    def counter(self, name: str) -> float:
        """A counter of the engine that fetches."""
        return self.fetches._counters[name]

    def encoded(self) -> tuple[int, int]:
        """Images that the encoder encoded, and the engine itself."""
        images = [engine.scheduler.memory.part(ImageCache) for engine in (self.encoder, self.engine)]
        assert images[0] is not None and images[1] is not None
        return images[0].num_encoded, images[1].num_encoded
