"""What a follower of a simulated worker holds: page table and KV of its own, and the device parts that its `RankRunner` drives.

Everything is as late as it may be: copies are made when something waits for them, pages are read when the step runs. A step
gives one partial sum for each item: the hash that this rank has for the item's prefix.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.kv.cache_spec import KVShard, combine
from tests.core.hash_model import Slot, step_hash
from tools.simulation.workers.executor import NOTHING, CheckedModel
from tools.simulation.world import Violation


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
