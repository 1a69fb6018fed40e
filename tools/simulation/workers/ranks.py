"""The ranks of a simulated worker: which units of a page each holds, and the process that reads and writes them for transfers.

Each rank has page table and KV of its own; stages before the leader's get what the rank with the same units gets. While a step
computes, a follower is up to a layer behind its leader. It outlives a leader that dies by a moment, in which its writes go on.

A follower's `RankRunner` drives parts that are as late as they may be: copies are made when something waits for them, pages are read
when the step runs. A step gives one partial sum for each item: the hash that this rank has for the item's prefix.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from disagg.metadata import ROW, MetadataBuffers
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.kv.cache_spec import KVShard, combine
from tests.core.hash_model import Slot, step_hash
from tools.simulation.workers.executor import NOTHING, CheckedModel
from tools.simulation.world import Process, Violation, World
from transfer_backends.contract import KVArgs, RankMemory, Region
from transfer_backends.liveness import ProcessMark

FIRST_PID = 1_000_000  # of followers
FIRST_PORT = 20_000
LONGEST_AFTERLIFE_S = 3.0


def page_sum(model: CheckedModel, held: KVShard, pages: Sequence[int], num_tokens: int | None) -> int:
    """As engine/kv/page_checksum.py: a sum over the parts in `held` of `pages`, so that ranks' sums add up.

    Two flipped bits move Python's hashes of tuples by amounts that may cancel out; their cubes do not.
    """
    parts = [unit * held.num_layers + layer for unit in held.units for layer in held.layers]
    total = 0
    for at, page in enumerate(pages):
        last = at == len(pages) - 1
        for offset in range((last and (num_tokens or 0) % model.page_size) or model.page_size):
            slot = model.kv.get((page, offset), NOTHING)
            total += sum(hash((at, offset, part, slot.value, slot.token)) ** 3 for part in parts)
    return combine([total])


class SampledTokens:
    """As engine/parallel/region.py: the last token of each slot, and how many steps have been sampled."""

    def __init__(self) -> None:
        self.row: dict[int, int] = {}
        self.count = 0

    def publish(self, row: dict[int, int]) -> None:
        self.row = dict(row)
        self.count += 1


class RankModel(CheckedModel):
    """The KV of one follower. `num_pages`: of its pool; 0: it has none yet. `stages_layers`: a step's layers end one by one."""

    def __init__(self, *, page_size: int, name: str, by_layer: bool) -> None:
        super().__init__(page_size=page_size, name=name)
        self.num_pages = 0
        self._by_layer = by_layer

    def end_layer(self, num_layers: int) -> None:
        if self._by_layer:
            super().end_layer(num_layers)

    def place(self, item: PlanItem) -> list[int]:
        """Enter the new pages of `item` into its row, as a page table does: what stood there before stays behind them."""
        row = self.rows.setdefault(item.slot, [])
        row += [0] * (item.page_start - len(row))
        row[item.page_start : item.page_start + len(item.new_pages)] = item.new_pages
        return row

    def compute(self, item: PlanItem, tokens: list[int]) -> int:
        """Write the KV of `tokens`; return the hash of the whole prefix."""
        row, tokens = self.place(item), self.seen(item, tokens)
        value = self.read(row, item.start, adapter=self.adapters.get(item.slot, 0))
        for position, token in enumerate(tokens, item.start):
            value = step_hash(value, token)
            at = self._at(row, position)
            if not 0 < at[0] <= self.num_pages:
                raise Violation(f"{self.name} writes page {at[0]}, and has {self.num_pages}")
            if self._by_layer:
                self._old[at] = self.kv.get(at, NOTHING)
            self.kv[at] = Slot(value, token)
        return value

    def see(self, plan: Plan) -> None:
        """Forget, copy and encode images."""
        for key in plan.forgets:
            self.features.pop(key, None)
        for land in plan.lands:
            self._land(land)
        self._encode(plan)

    def begin_layers(self) -> None:
        self._old.clear()
        self._layers_done = 0

    def read(self, row: list[int], end: int, *, adapter: int = 0) -> int:
        value, size, kv = adapter, self.page_size, self.kv
        for position in range(end):
            slot = kv.get((row[position // size], position % size), NOTHING)
            value = step_hash(value, slot.token)
            if slot.value != value:
                raise Violation(
                    f"{self.name} reads wrong KV: position {position} of {end}, page {row[position // size]}"
                    f" holds {slot.value}, must hold {value}"
                )
        self.num_checked += end
        return value


class SimCopies:
    """In place of engine/executor/model_runner.py. A forward waits for the copies of its step, and `wait` for all up to one."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._ahead: deque[Plan] = deque()
        self.made = 0  # the last step whose copies have been waited for

    def begin(self, plan: Plan) -> "SimCopies":
        self._ahead.append(plan)
        return self

    def wait(self, seq: int) -> None:
        while self._ahead and self._ahead[0].seq <= seq:
            self._model._copy_pages(self._ahead.popleft())
        self.made = max(self.made, seq)


class SimForward:
    """In place of engine/executor/passes.py. `partials`: by step, of each item."""

    def __init__(self, model: RankModel, tokens: "FollowedTokens") -> None:
        self._model = model
        self._tokens = tokens
        self.partials: dict[int, list[int]] = {}

    def attach(self, model: Any) -> None:
        """Its weights are the model's."""

    def open(self, opened: SlotOpen) -> None:
        self._model.adapters[opened.slot] = opened.adapter

    def prepare(self, model: Any, plan: Plan) -> None:
        self._model.see(plan)

    def join(self, model: Any, plan: Plan, arrival: SimCopies) -> None:
        """No rank computes for others here."""
        assert plan.agreed is None

    def run(self, model: Any, plan: Plan, arrival: SimCopies) -> "Hidden":
        tokens = [self._tokens.resolve(item.tokens) for item in plan.items]
        arrival.wait(plan.seq)
        self._model.begin_layers()
        computed = [self._model.compute(*of) for of in zip(plan.items, tokens, strict=True)]
        self.partials[plan.seq] = [value + self._model.num_forgotten for value in computed]
        return Hidden()


class Hidden:
    """What a step leaves for the logits, or for the next stage."""

    hidden: "Hidden"
    gave_logits = False

    def __init__(self) -> None:
        self.hidden = self

    def __getitem__(self, rows: list[int]) -> "Hidden":
        return self


class FollowedTokens:
    """In place of engine/ranks/links.py's `FollowerFutureMap`."""

    def __init__(self, shared: SampledTokens) -> None:
        self._shared = shared
        self._sampled = 0

    @property
    def there(self) -> bool:
        """Whether the leader has sampled every step before the present one."""
        return self._shared.count >= self._sampled

    def resolve(self, tokens: list[int]) -> list[int]:
        return [token if token >= 0 else self._shared.row[-token - 1] for token in tokens]

    def on_sampled(self) -> None:
        self._sampled += 1


class SimWeightsOfRank:
    """The model and the link to the next stage that a `RankRunner` has: what they compute is in the partial sums."""

    def logits(self, hidden: Hidden) -> None:
        """The leader has them."""

    def send(self, hidden: Hidden) -> None:
        """To the next stage."""


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
