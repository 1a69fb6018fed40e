"""Features on their way from encoder workers to prefill workers: the pools on both ends, whose rows say of which image and weights they are.

    encoder's pool   a slot holds what the model sees of one row of an image (images.py), and the weights that computed it
    arrivals         the same slots, as writes land in them; a step copies an image out of pages that nothing else may have yet

What is torn, stale, of another image or of other weights is seen as something else, and so are all tokens behind it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from disagg.features.feature_fetching import FeatureFetches, rooms_of
from disagg.metadata import ROW, Checksum, MetadataBuffers
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.memory import Memory
from engine.core.plan import FeatureLand, ItemResult, Plan, PlanItem, StepResult
from engine.ranks.rank_checksum import alone
from tests.core.hash_model import HashModel, Slot
from tools.simulation.options import Options
from tools.simulation.surroundings import SLOT_BYTES
from tools.simulation.watched import WatchedReceivers
from tools.simulation.workers.executor import NOTHING, CheckedModel
from tools.simulation.workers.group import Shape, own_checksum
from tools.simulation.workers.ranks import RankView
from tools.simulation.workers.transfer_engine import AUX_BASE, KV_BASE
from tools.simulation.world import Process, Violation
from transfer_backends.contract import KVArgs, Region
from transfer_backends.decode.manager import DecodeManager

ALONE = Shape(1, 1, 1)  # no rank beside the leader has a part of them
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


def feature_checksum(model: CheckedModel, options: Options) -> Checksum | None:
    return alone(own_checksum(model, ALONE.held(0))) if options.checksum else None


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
    """Where the features of a prefill worker arrive: the memory, and what is exposed of it. `weights_of`: as above.

    Implements ranks.py's `Whole` for its one rank.
    """

    def __init__(self, process: Process, options: Options, *, weights_of: Callable[[], int], num_ranks: int) -> None:
        self.process = process
        self.kv_args = feature_args(options, num_pages=options.feature_pages[0])
        self.allocator = PageAllocator(num_pages=options.feature_pages[0], page_size=options.feature_page)
        self.exposed: dict[str, Counter[int]] = {"kv": Counter(), "aux": Counter()}
        self.view = RankView(self, 0, process, layers=1)
        self._options = options
        self._weights_of = weights_of
        self.num_ranks = num_ranks
        self._shared: dict[
            tuple[bytes | int, ...], tuple[list[int], int]
        ] = {}  # features, and how many ranks have still to come
        self._pages = CheckedModel(page_size=options.feature_page, name=process.name)
        checksum = feature_checksum(self._pages, options)
        self.metadata = MetadataBuffers(options.feature_rows, weights=weights_of, checksum=checksum)

    def fetches(self, memory: Memory, manager: DecodeManager) -> FeatureFetches:
        """As disagg/feature_transfers.py."""
        return FeatureFetches(
            memory=memory,
            manager=WatchedReceivers(manager, self.exposed, seen=Counter()),
            metadata=self.metadata,
            allocator=self.allocator,
            rooms=rooms_of(manager.incarnation),
            timeout_s=self._options.feature_timeout_s,
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
                raise Violation(f"{self.process.name}: a step copies features out of page {page}, which was given back")
        return [
            self._feature(self._pages.kv.get(self._pages._at(land.pages, row), NOTHING))
            for row in range(land.num_tokens)
        ]

    def _feature(self, slot: Slot) -> int:
        return slot.value if slot.token == self._weights_of() else slot.value + OTHERWISE

    # ---- as ranks.py sees memory

    def models_of(self, tp_rank: int) -> list[CheckedModel]:
        return [self._pages]

    def write_allowed(self, kind: str, idx: int) -> bool:
        return self.exposed[kind][idx] > 0

    def read_allowed(self, kind: str, idx: int) -> bool:
        raise Violation(f"{self.process.name} sends features that have arrived")

    def copy_row(self, other: Any, src: int, dst: int) -> None:
        self.metadata._rows[dst] = np.array(other.metadata._rows[src])

    def copy_beside(self, other: Any, kind: str, src: int, dst: int) -> None:
        raise Violation(f"{other.process.name} sends {kind}s beside features")

    def read_row(self, region: Region, row: int) -> bytes:
        raise Violation(f"{self.process.name} sends rows of features that have arrived")

    def write_row(self, region: Region, row: int, data: bytes) -> None:
        if not self.write_allowed("aux", row):
            raise Violation(f"a message writes row {row} of features of {self.process.name}, which moved on")
        self.metadata._rows[row] = np.frombuffer(data, ROW)[0]
