"""The ranks of a simulated worker: which units of a page each holds, and the process that reads and writes them for transfers.

Each rank has KV of its own (rank_models.py); stages before the leader's get what the rank with the same units gets. While a step
computes, a follower is up to a layer behind its leader. It outlives a leader that dies by a moment, in which its writes go on.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from disagg.metadata import ROW, MetadataBuffers
from engine.core.mem_cache.page_allocator import PageAllocator
from tools.simulation.workers.executor import CheckedModel
from tools.simulation.world import Process, Violation, World
from transfer_backends.contract import KVArgs, RankMemory, Region
from transfer_backends.liveness import ProcessMark

FIRST_PID = 1_000_000  # of followers
FIRST_PORT = 20_000
LONGEST_AFTERLIFE_S = 3.0


class Follower(Process):
    """Rank `rank` of a worker; `leader` is its rank 0."""

    def __init__(self, world: World, leader: Process, rank: int, draw: random.Random) -> None:
        super().__init__(world, node=leader.node, life=leader.life, skew_s=leader.skew_s)
        self._rank = rank
        self._afterlife_s = draw.choice([0.0, *(draw.uniform(0.0, LONGEST_AFTERLIFE_S) for _ in range(3))])
        self.ends_s: float | None = None  # known once its leader is dead
        leader.on_death.append(self._outlive)

    def _outlive(self) -> None:
        self.ends_s = self.world.now_s + self._afterlife_s
        self.world.at(self.ends_s, f"{self.name} ends", self.kill)

    @property
    def name(self) -> str:
        return f"{self.node}.{self.life}/{self._rank}"

    def kill(self) -> None:
        """A no-op the second time: it may die before its leader."""
        if self.alive:
            super().kill()

    def mark(self, host: str) -> ProcessMark:
        number = 100 * self.life + self._rank
        return ProcessMark(host, FIRST_PID + number, 1, FIRST_PORT + number)


class Whole:
    """Memory of one life of a worker, with all its ranks, as engines of peers and its own reach it.

    `ranks`: processes. `models_of(tp_rank)`: which hold its KV. `allocators`: by kind of item.
    """

    def __init__(
        self,
        ranks: Sequence[Process],
        *,
        kv_args: KVArgs,
        metadata: MetadataBuffers,
        models_of: Callable[[int], list[CheckedModel]],
        allocators: Mapping[str, PageAllocator],
        layers: int = 1,
    ) -> None:
        self.process = ranks[0]
        self.kv_args, self.metadata, self.models_of = kv_args, metadata, models_of
        self.views = [RankView(self, number, rank, layers=layers) for number, rank in enumerate(ranks)]
        kinds = ("kv", "aux", *(pool.kind for pool in kv_args.pools))
        self.exposed: dict[str, Counter[int]] = {kind: Counter() for kind in kinds}
        self._allocators = allocators
        self._times_free = {kind: _count_frees(allocator) for kind, allocator in allocators.items()}

    def write_allowed(self, kind: str, idx: int) -> bool:
        return self.exposed[kind][idx] == 1 and self._owner_of(kind, idx) in ("held", "quarantined")

    def read_allowed(self, kind: str, idx: int) -> bool:
        return self._owner_of(kind, idx) in ("held", "cached")

    def times_free(self, kind: str, idx: int) -> int:
        """How often a page or slot has become free; metadata rows are not counted."""
        return self._times_free[kind][idx] if kind in self._times_free else 0

    def _owner_of(self, kind: str, idx: int) -> str:
        """Where a page, slot or metadata row stands: a state of the allocator."""
        if kind == "aux":
            return "free" if idx in self.metadata._free else "held"
        return str(self._allocators[kind].state_of(idx))

    def copy_row(self, other: "Whole", src: int, dst: int) -> None:
        self.metadata._rows[dst] = np.array(other.metadata._rows[src])

    def copy_beside(self, other: "Whole", kind: str, src: int, dst: int) -> None:
        self.models_of(0)[0].land_beside(other.models_of(0)[0], kind, src, dst)

    def read_row(self, region: Region, row: int) -> bytes:
        if not self.read_allowed("aux", row):
            raise Violation(f"{self.process.name} sends metadata row {row}, which it gave up")
        return bytes(self.metadata._rows[row].tobytes())

    def write_row(self, region: Region, row: int, data: bytes) -> None:
        if not self.write_allowed("aux", row):
            raise Violation(f"a message writes metadata row {row} of {self.process.name}, which moved on")
        self.metadata._rows[row] = np.frombuffer(data, ROW)[0]
        self.process.world.seen["rows by message"] += 1


def _count_frees(allocator: PageAllocator) -> Counter[int]:
    """Count from now on how often each page becomes free."""
    found, give_back = Counter[int](), allocator._give_back

    def counted(pages: Sequence[int]) -> None:
        found.update(pages)
        give_back(pages)

    allocator._give_back = counted  # type: ignore[method-assign]
    return found


class RankView:
    """The memory of one rank that takes part in transfers: an item of its KV is a unit of a page, in `layers` parts.

    `polled_s`: when its engine was driven last. `ends_s`: of a follower, once its leader is dead.
    """

    def __init__(self, whole: Whole, rank: int, process: Process, *, layers: int) -> None:
        self.whole, self.rank, self.process = whole, rank, process
        self.polled_s = 0.0
        self._layers = layers
        self._sources: dict[tuple[str, int], int] = {}  # (writing worker, unit) -> the rank there that writes it

    @property
    def ends_s(self) -> float | None:
        return self.process.ends_s if isinstance(self.process, Follower) else None

    @property
    def memory(self) -> RankMemory:
        return self.whole.kv_args.ranks[self.rank]

    @property
    def page_size(self) -> int:
        return self.whole.kv_args.page_size

    def region(self, kind: str) -> Region:
        args = self.whole.kv_args
        pools = {pool.kind: part.region for pool, part in zip(args.pools, self.memory.pools, strict=True)}
        return {"kv": self.memory.kv, "aux": args.aux, **pools}[kind]

    def write_allowed(self, kind: str, idx: int) -> bool:
        return self.whole.write_allowed(kind, self._place(kind, idx)[0])

    def read_allowed(self, kind: str, idx: int) -> bool:
        return self.whole.read_allowed(kind, self._place(kind, idx)[0])

    def times_free(self, kind: str, idx: int) -> int:
        return self.whole.times_free(kind, self._place(kind, idx)[0])

    def damage(self, item: int, offset: int) -> None:
        args = self.whole.kv_args
        if self.rank and args.kv_units < len(args.ranks):
            return  # a replica: a checksum covers each part of the KV once
        models = self.whole.models_of(self.rank)
        models[item % len(models)].damage(self._place("kv", item)[0], offset)

    def copy_from(self, other: "RankView", kind: str, src: int, dst: int, part: range) -> None:
        if kind == "aux":
            self.whole.copy_row(other.whole, src, dst)
            return
        if kind != "kv":
            self.process.world.seen[f"writes of {kind}s"] += 1
            self.whole.copy_beside(other.whole, kind, src, dst)
            return
        (src_page, unit), (dst_page, mine) = other._place(kind, src), self._place(kind, dst)
        if unit != mine:
            raise Violation(f"{other.process.name} writes unit {unit} where {self.process.name} has unit {mine}")
        if self._sources.setdefault((other.whole.process.name, unit), other.rank) != other.rank:
            raise Violation(f"two ranks of {other.whole.process.name} write unit {unit} of {self.process.name}")
        num, size = self._layers, self.memory.kv.item_bytes
        layers = range(part.start * num // size, part.stop * num // size)
        seen = self.process.world.seen
        seen["writes of some layers"] += len(layers) < num
        seen["writes of followers"] += bool(self.rank or other.rank)
        at, of = (unit - self.memory.first_unit) * num, self.memory.num_units * num
        sources = other.whole.models_of(other.rank)
        for i, model in enumerate(self.whole.models_of(self.rank)):
            model.land(sources[i % len(sources)], src_page, dst_page, layers, at=at, of=of, lag=min(1, other.rank))

    def _place(self, kind: str, item: int) -> tuple[int, int]:
        """Return (page, unit of the model), or of what is no page (item, 0)."""
        if kind != "kv":
            return item, 0
        page, unit = divmod(item, self.memory.num_units)
        return page, self.memory.first_unit + unit
