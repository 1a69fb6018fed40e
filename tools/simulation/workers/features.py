"""Features on their way from encoder workers to prefill workers: the pools on both ends, whose rows say of which image and weights they are.

    encoder's pool   a slot holds what the model sees of one row of an image (images.py), and the weights that computed it
    arrivals         the same slots, as writes land in them; a step copies an image out of pages that nothing else may have yet

What is torn, stale, of another image or of other weights is seen as something else, and so are all tokens behind it.
"""

from collections.abc import Callable

from disagg.metadata import ROW, MetadataBuffers
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.plan import FeatureLand, ItemResult, Plan, PlanItem, StepResult
from engine.ranks.rank_checksum import alone
from tests.core.hash_model import HashModel, Slot
from tools.simulation.options import Options
from tools.simulation.surroundings import SLOT_BYTES
from tools.simulation.workers.executor import NOTHING, CheckedModel
from tools.simulation.workers.group import ALONE, own_checksum
from tools.simulation.workers.ranks import Whole
from tools.simulation.workers.transfer_engine import AUX_BASE, KV_BASE
from tools.simulation.world import Process, Violation
from transfer_backends.contract import KVArgs, Region

OTHERWISE = 50  # what features of other weights are off by


def feature_args(options: Options, *, num_pages: int) -> KVArgs:
    """As disagg/feature_transfers.py."""
    return KVArgs(
        kv=Region(KV_BASE, 1 + num_pages, options.feature_page * SLOT_BYTES, None),
        aux=Region(AUX_BASE, options.feature_rows, ROW.itemsize, None),
        signature="simulated features",
        page_size=options.feature_page,
        dtype="hash",
        kv_checksum="simulated" if options.checksum else "off",
    )


class EncodingModel(CheckedModel):
    """The tower of an encoder worker: a step writes the rows of its images into pages. `weights_of`: a number for its weights."""

    def __init__(self, *, page_size: int, name: str, weights_of: Callable[[], int]) -> None:
        super().__init__(page_size=page_size, name=name)
        self._weights_of = weights_of

    def run(self, plan: Plan) -> StepResult:
        return HashModel.run(self, plan)

    def _forward(self, item: PlanItem, mask: bytes | None, path: list[int]) -> ItemResult:
        row = self.rows[item.slot]
        row += item.new_pages
        if item.slot not in self.lost:
            for position, value in enumerate(HashModel.seen(self, item, item.tokens), item.start):
                self.kv[self._at(row, position)] = Slot(value, self._weights_of())
        return ItemResult(None)

    def verify_features(self, pages: list[int], features: list[int]) -> None:
        """Raises Violation for pages, which others may find, that hold something else."""
        for position, value in enumerate(features):
            found = self.kv.get(self._at(pages, position), NOTHING)
            if found != Slot(value, self._weights_of()):
                raise Violation(
                    f"{self.name} keeps features {found} in page {pages[position // self.page_size]}, not {value}"
                )
        self.num_checked += len(features)


class Arrivals:
    """Where the features of a prefill worker arrive: the memory, and what is exposed of it. `weights_of`: as above."""

    def __init__(self, process: Process, options: Options, *, weights_of: Callable[[], int], num_ranks: int) -> None:
        self.allocator = PageAllocator(num_pages=options.feature_pages[0], page_size=options.feature_page)
        self.num_ranks = num_ranks
        self._process = process
        self._weights_of = weights_of
        self._shared: dict[
            tuple[bytes | int, ...], tuple[list[int], int]
        ] = {}  # features, and how many ranks have still to come
        self._pages = CheckedModel(page_size=options.feature_page, name=process.name)
        checksum = alone(own_checksum(self._pages, ALONE.held(0))) if options.checksum else None
        self.memory = Whole(
            [process],
            kv_args=feature_args(options, num_pages=options.feature_pages[0]),
            metadata=MetadataBuffers(options.feature_rows, weights=weights_of, checksum=checksum),
            models_of=lambda tp_rank: [self._pages],
            allocators={"kv": self.allocator},
        )

    def features_of(self, land: FeatureLand) -> list[int]:
        """What a step copies on one of `num_ranks`: the first to come to it shares with the others."""
        key = (land.key, *land.pages)
        features, left = self._shared.pop(key, None) or (self._read(land), self.num_ranks)
        if left > 1:
            self._shared[key] = features, left - 1
        return features

    def _read(self, land: FeatureLand) -> list[int]:
        for page in land.pages:
            if self.allocator.state_of(page) != "held":
                raise Violation(
                    f"{self._process.name}: a step copies features out of page {page}, which was given back"
                )
        return [
            self._feature(self._pages.kv.get(self._pages._at(land.pages, row), NOTHING))
            for row in range(land.num_tokens)
        ]

    def _feature(self, slot: Slot) -> int:
        return slot.value if slot.token == self._weights_of() else slot.value + OTHERWISE
