"""The executor with checkable KV: each slot holds the hash of the token prefix that ends there, every read verifies all.

A step is computed at some moment between its launch and its collection, in stream order, as a device would. So writes
of peers fall before, between and after steps. With `layers` it is computed in stages, and what lies in its slots is new in
the layers that are done, and old in the others: whoever sends too early sends that.

A namespace of the prefix cache counts as an adapter: the same tokens have other KV there, so a page that crosses to another
namespace is wrong KV.

What a slot's hash is of a token has its RoPE position and, of an image, its pixels (images.py): KV of other images or turns is wrong KV.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from engine.core.plan import FeatureLand, Plan, PlanItem, StepResult
from engine.executor.executor import StepAnswer
from engine.images import ImageInput
from tests.core.hash_model import Copy, HashModel, Slot, State, prefix_hash, step_hash
from tools.simulation.workers.images import PlacedImages, content, contents, delta_of, seen_at, seen_of
from tools.simulation.world import Violation
from transfer_backends.contract import NOTHING_YET, Progress

NOTHING = Slot(-1, -1)  # never written
OTHER_WEIGHTS = -1


Asked = tuple[Sequence[str], PlacedImages]  # a request's namespace and images


def adapter_of(namespace: Sequence[str]) -> int:
    return prefix_hash(list("\0".join(namespace).encode()))


def _nothing_arrived(land: FeatureLand) -> list[int]:
    raise Violation("a step copies features where none arrive")


class CheckedModel(HashModel):
    """Knows by itself what each slot's KV must be, from the tokens that the plans name."""

    def __init__(self, *, page_size: int, name: str) -> None:
        super().__init__(page_size=page_size)
        self.name = name
        self.num_checked = 0
        self.num_landed_together = 0  # steps that copy several images
        self.num_forgotten = 0  # other weights so often
        self.ranks: Any = None  # the other ranks of the worker (group.py), where it has any
        self._old: dict[tuple[int, int], Slot] = {}  # what was in the slots that the step under way writes
        self._layers_done = 0
        self._parts: dict[tuple[int, int], list[Slot]] = {}  # by layer, of slots that landed layer by layer
        self._expected: dict[int, list[int]] = {}  # slot -> hash at each position
        self._deltas: dict[int, int] = {}  # slot -> RoPE position minus position behind its images
        self.images: dict[tuple[int, int], PlacedImages] = {}  # of the requests that plans open, by plan and slot
        self.arrived: Callable[[FeatureLand], list[int]] = _nothing_arrived

    def run(self, plan: Plan) -> StepResult:
        for opened in plan.opens:
            hashes: list[int] = []
            images = self.images.pop((plan.seq, opened.slot), ())
            for token in seen_of([*opened.prompt_ids, *opened.output_ids], images):
                hashes.append(step_hash(hashes[-1] if hashes else opened.adapter, token))
            self._expected[opened.slot], self._deltas[opened.slot] = hashes, delta_of(images)
        self.num_landed_together += len(plan.lands) > 1
        if self.ranks is not None and plan.items:
            self.ranks.join(plan)
        result = super().run(plan)
        if self.ranks is not None and plan.items:
            self.ranks.add_up(plan, result)
        for item, sampled in zip(plan.items, result.items, strict=True):
            if sampled.token is not None:
                hashes, turn = self._expected[item.slot], item.kv_len + self._deltas[item.slot]
                seen = seen_at(sampled.token, item.kv_len, (turn,) * 3)
                hashes.append(step_hash(hashes[item.kv_len - 1], seen))
        return result

    def _land(self, land: FeatureLand) -> None:
        assert land.key not in self.features, "features land that are here already"
        arrived = self.arrived(land)
        own = [content(land.key[0], row) for row in range(land.num_tokens)]  # its key holds its number
        if arrived != own:
            raise Violation(f"{self.name} copies features {arrived} as an image's whose own are {own}")
        self.features[land.key], self.encoded_by[land.key] = arrived, self.weights

    def features_of(self, image: ImageInput) -> list[int]:
        return contents(image)

    def seen(self, item: PlanItem, tokens: list[int]) -> list[int]:
        found, places = super().seen(item, tokens), range(item.start, item.kv_len)
        if item.images is None:
            return found
        rope, delta = item.images.rope, item.images.rope_delta
        turns = [(place + delta,) * 3 for place in places] if rope is None else list(zip(*rope, strict=True))
        return [seen_at(*of) for of in zip(found, places, turns, strict=True)]

    def begin(self, plan: Plan) -> StepResult:
        """As `run`, but no layer is done yet."""
        opened, self._layers_done = {opened.slot for opened in plan.opens}, 0
        for item in plan.items:
            row = ([] if item.slot in opened else self.rows[item.slot]) + item.new_pages
            for at in (self._at(row, position) for position in range(item.start, item.kv_len)):
                self._old[at] = self.kv.get(at, NOTHING)
        return self.run(plan)

    def value_behind(self, item: PlanItem) -> int:
        """The hash of the prefix that ends with `item`."""
        return self.kv[self._at(self.rows[item.slot], item.kv_len - 1)].value

    def end_layer(self, num_layers: int) -> None:
        if self.ranks is not None:
            self.ranks.end_layer(num_layers)
        self._layers_done += 1
        if self._layers_done == num_layers:
            self._old.clear()

    def layer_of(self, at: tuple[int, int], layer: int, *, lag: int = 0) -> Slot:
        """What lies in a layer of a slot at a rank that is `lag` layers behind, while the step computes."""
        hidden = layer >= self._layers_done - lag and at in self._old
        return self._old[at] if hidden else self.kv.get(at, NOTHING)

    def land(
        self, other: "CheckedModel", src: int, dst: int, layers: range, *, of: int, at: int = 0, lag: int = 0
    ) -> None:
        """`layers` of a unit of page `src` of `other`, whose rank is `lag` behind, come to `dst`.

        `of`: parts of a page, over all its units and layers; `at`: the unit's first. A slot is whole when all are of one time.
        """
        for offset in range(self.page_size):
            there, here = (src, offset), (dst, offset)
            before = self.kv.get(here, NOTHING)
            parts = self._parts.setdefault(here, [before] * of)
            if _whole(parts) != before:  # something else has written since
                parts[:] = [before] * of
            parts[at + layers.start : at + layers.stop] = [other.layer_of(there, layer, lag=lag) for layer in layers]
            self.kv[here] = _whole(parts)

    def read(self, row: list[int], end: int, *, adapter: int = 0, path: Sequence[int] = ()) -> int:
        assert not path, "nothing is drafted here"
        slot = next((slot for slot, mine in self.rows.items() if mine is row), None)
        if slot is None:  # no request's: the cache's, looked at
            return super().read(row, end, adapter=adapter)
        expected, size = self._expected[slot], self.page_size
        for position in range(end):
            found = self.kv.get((row[position // size], position % size), NOTHING).value
            if found != expected[position]:
                raise Violation(
                    f"{self.name} reads wrong KV: slot {slot}, position {position} of {end}, page {row[position // size]}"
                    f" holds {found}, must hold {expected[position]}"
                )
        self.num_checked += end
        return expected[end - 1] if end else adapter

    def forget(self) -> None:
        """Whatever is cached belongs to other weights."""
        self.num_forgotten += 1
        for memory in (self.kv, self.window_kv, self.states):
            memory.clear()
        self.encoded_by = dict.fromkeys(self.encoded_by, OTHER_WEIGHTS)
        for key, copy in self.copies.items():
            blank: list[Slot | None] = [None] * self.page_size
            state = None if copy.state is None else State(-1, -1)
            self.copies[key] = Copy([blank] * len(copy.pages), [blank] * len(copy.window), state)

    def damage(self, page: int, offset: int) -> None:
        """A bit flips."""
        slot = self.kv[page, offset]
        self.kv[page, offset] = Slot(slot.value ^ 1, slot.token)

    def land_beside(self, other: "CheckedModel", kind: str, src: int, dst: int) -> None:
        """A state or a page of a window of `other` comes to `dst`."""
        if kind == "state":
            self.states[dst] = other.states.get(src, State(-1, -1))
            return
        for offset in range(self.page_size):
            self.window_kv[dst, offset] = other.window_kv.get((src, offset), NOTHING)


def _whole(parts: list[Slot]) -> Slot:
    return parts[0] if all(part == parts[0] for part in parts) else NOTHING


@dataclass(eq=False)
class SimLaunch:
    """`computed`: what will be the result when all layers are done."""

    plan: Plan
    computed: StepResult | None = None
    result: StepResult | None = None
    sampling: "Future[StepResult] | None" = None  # of a group, which watches it
    answer: StepAnswer | None = None  # of its followers


class SimExecutor:
    """In place of engine/executor/executor.py. `compute_one` is called by the worker at moments it draws.

    `layers`: stages of a step after its begin; 1: it is computed all at once. It is the `LayerClock`, too.
    """

    ticking = False
    runner = None

    def __init__(
        self, model: CheckedModel, *, layers: int = 1, asked_of: Callable[[int], Asked] = lambda slot: ((), ())
    ) -> None:
        """`asked_of(slot)`: namespace and images of the request that a plan opens there."""
        self.model = model
        self._asked_of = asked_of
        self.layers = layers
        self.wake: Callable[[], None] = lambda: None
        self._launched: deque[SimLaunch] = deque()
        self._progress = NOTHING_YET

    def progress(self) -> Progress:
        return self._progress

    @property
    def stages(self) -> int:
        """Calls of `compute_one` that a step takes."""
        return 1 if self.layers == 1 else 1 + self.layers

    def named(self, plan: Plan) -> Plan:
        """`plan` with the adapter of each request that it opens; the model learns what that sees."""
        opens = []
        for opened in plan.opens:
            namespace, images = self._asked_of(opened.slot)
            opens.append(replace(opened, adapter=adapter_of(namespace)))
            if images:
                self.model.images[plan.seq, opened.slot] = images
        return replace(plan, opens=opens)

    def launch(self, plan: Plan) -> SimLaunch:
        launch = SimLaunch(self.named(plan), sampling=None if self.model.ranks is None else Future())
        self._launched.append(launch)
        return launch

    def launch_forward(self, plan: Plan) -> SimLaunch:
        return self.launch(plan)

    def launch_sampling(self, launch: SimLaunch) -> None:
        """The hash model samples with its forward: no grammar is used here."""

    def compute_one(self) -> None:
        """The oldest step that has not been computed yet, or its next stage."""
        if not self._launched:
            return
        launch = self._launched[0]
        if self.layers == 1:
            launch.result = self.model.run(launch.plan)
        elif launch.computed is None:
            launch.computed = self.model.begin(launch.plan)
            self._note(Progress(launch.plan.seq, 0))
        else:
            self.model.end_layer(self.layers)
            self._note(Progress(launch.plan.seq, self._progress.layers + 1))
            launch.result = launch.computed if self._progress.layers == self.layers else None
        if launch.result is not None:
            self._launched.popleft()
            if launch.sampling is not None:
                launch.sampling.set_result(launch.result)

    def _note(self, progress: Progress) -> None:
        self._progress = progress
        self.wake()

    def ended(self, launch: SimLaunch) -> bool:
        return launch.result is not None

    def collect(self, launch: SimLaunch) -> StepResult:
        while launch.result is None:
            self.compute_one()
        return launch.result
