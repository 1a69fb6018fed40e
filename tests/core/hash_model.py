"""A model in a few lines whose KV can be checked: each cache slot holds the hash of the token prefix that ends there.

A step verifies every slot it reads, so a lost, stale, swapped or overwritten page fails at once, and whatever the model
says (next token, logprob, hidden state) is a function of the whole prefix, so the right answer needs no engine.
"""

import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.core.plan import FeatureLand, ItemResult, Phase, Plan, PlanItem, StateCopy, StepResult
from engine.images import ImageInput, key_ids
from engine.messages import TokenLogprob
from engine.speculative.drafts import SLOTS, number_of, placeholder

if TYPE_CHECKING:
    from tests.core.drafter_model import DrafterModel

VOCAB = 50
NO_MEMORY = "no memory"
NO_DRAFT = -1
MOST_UNSEEN = 1000  # drafts of a request that a step reads before the host sees them
BAD_SHARE = 61  # one prefix in so many gives NaN, where the model may


def step_hash(before: int, token: int) -> int:
    return (before * 1000003 + token + 1) % (2**61 - 1)


def prefix_hash(tokens: list[int], seed: int = 0) -> int:
    """`seed`: other weights, or an adapter: other KV of the same tokens."""
    value = seed
    for token in tokens:
        value = step_hash(value, token)
    return value


def next_token(prefix: int, mask: bytes | None = None) -> int:
    """The first token that `mask` allows, from the one that the prefix says."""
    first = (prefix >> 7) % VOCAB
    if mask is None:
        return first
    return next(t % VOCAB for t in range(first, first + VOCAB) if mask[t % VOCAB // 8] >> (t % VOCAB % 8) & 1)


def is_bad(prefix: int) -> bool:
    return prefix % BAD_SHARE == 0


def logprob_of(prefix: int, token: int) -> float:
    """Of `token` behind `prefix`."""
    return -float((prefix + token * 7) % 4096)


def hidden_of(prefix: int) -> list[float]:
    """Small whole numbers: their float32 sums are exact in any order."""
    return [float(prefix % 251), float(prefix % 127)]


def expected_tokens(prompt: list[int], n: int, eos: int | None = None, *, adapter: int = 0) -> list[int]:
    """What greedy generation must give. An adapter changes the KV of every token."""
    value, out = prefix_hash(prompt, adapter), []
    while len(out) < n:
        token = next_token(value)
        out.append(token)
        if token == eos:
            break
        value = step_hash(value, token)
    return out


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state: of `length` tokens, whose prefix hash is `value` (None: of no tokens, so of any weights)."""

    length: int
    value: int | None


@dataclass(frozen=True, slots=True)
class Slot:
    """One token's place in a page: the hash of the prefix that ends here, and the token."""

    value: int
    token: int


KV = dict[tuple[int, int], Slot]


@dataclass(frozen=True, slots=True)
class Copy:
    """Of what a request remembers, in host memory."""

    pages: list[list[Slot | None]]
    window: list[list[Slot | None]]
    state: State | None


class HashModel:
    """Executes plans in the order of the stream, like the model runner: page rows, FutureMap, KV by (page, offset).

    `weights`: other weights, other KV. What it reads of a token of an image is its key id. `gives_nan`: some prefixes do. `fails`: whether a step
    finds no memory; then it and those in flight behind it write rubbish for its requests, which no other may find.
    """

    def __init__(self, *, page_size: int) -> None:
        self.page_size = page_size
        self.weights = 0
        self.gives_nan = False
        self.fails: Callable[[Plan], bool] = lambda plan: False
        self.lost: set[int] = set()  # slots of requests in failed steps
        self.kv: KV = {}
        self.rows: dict[int, list[int]] = {}
        self.adapters: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.copies: dict[int, Copy] = {}  # in host memory
        self.host: dict[int, list[Slot]] = {}  # host page -> its slots
        self.host_states: dict[int, State] = {}  # by slot in the host
        self.window = 0  # tokens that a query of some layers sees; 0: all layers see all
        self.window_kv: KV = {}
        self.window_rows: dict[int, list[int]] = {}
        self.states: dict[int, State] = {}  # recurrent ones by slot
        self.state_of: dict[int, int] = {}  # row -> slot; 0: the model has none
        self.shadows = 0  # of how many requests a step may verify drafts
        self.passed: dict[
            int, dict[int, State]
        ] = {}  # row -> the states by length that its run passed, in the last step with drafts
        self.last_seq = -1  # of the steps that were run
        self.drafter: DrafterModel | None = None  # in the executor
        self.unseen: dict[
            int, list[int]
        ] = {}  # slot -> its newest token that counts, then drafts: for plans without them
        self.counting: dict[int, int] = {}  # slot -> drafts that count, of its last verify step
        self.features: dict[bytes, list[int]] = {}  # of images, by key
        self.encoded_by: dict[bytes, int] = {}  # the weights that they are of
        self.image_room = 0  # tokens whose features there is room for
        self.arrivals: KV = {}  # where encode workers write features: as values, and as tokens the weights that they are of

    def run(self, plan: Plan) -> StepResult:
        self.last_seq = plan.seq
        for rewind in plan.rewinds:
            self.states[self.state_of[rewind.slot]] = self.passed[rewind.slot][rewind.length]
        self._copy_pages(plan)
        for slot in plan.closes:
            del self.rows[slot]
        for opened in plan.opens:
            assert opened.slot not in self.rows, "a slot is opened twice"
            self.rows[opened.slot] = []
            self.window_rows[opened.slot] = []
            self.adapters[opened.slot] = opened.adapter
            self.state_of[opened.slot] = opened.state
            self.lost.discard(opened.slot)
        self._copy_states(plan.states)
        if any(item.draft for item in plan.items):
            self._begin_runs(plan)
        for key in plan.forgets:
            self.features.pop(key, None)
        if self.fails(plan) and plan.skips_model:
            for item in plan.items:
                self.rows[item.slot] += item.new_pages
                self._keep_unseen(item.slot, None, [])
            return StepResult(plan.seq, [ItemResult(None) for _ in plan.items], failure=NO_MEMORY)
        if self.fails(plan) or self._lacks_features(plan):
            self.lost |= {item.slot for item in plan.items}
            return StepResult(plan.seq, [self._rubbish(item) for item in plan.items], failure=NO_MEMORY)
        for land in plan.lands:
            self._land(land)
        self._encode(plan)
        items = [self._filled_in(item) for item in plan.items]
        paths = _paths(items)
        results = [self._forward(item, plan.masks.get(i), paths[i]) for i, item in enumerate(items)]
        self._copy_states(plan.snapshots)
        if self.drafter is not None and not plan.skips_model:
            self.drafter.follow(self._runs(items, results))
        self._move_accepted(items, results)
        return StepResult(plan.seq, results)

    def _filled_in(self, item: PlanItem) -> PlanItem:
        """What the plan does not know: drafts, and where a drafter begins behind drafts that are judged by now."""
        more = min(item.unverified, self.counting.get(item.slot, 0)) if item.unverified else 0
        if item.tokens[0] >= -SLOTS and not item.to_draft:
            return item
        tokens = [self._read(item.slot, token) for token in item.tokens]
        return replace(item, tokens=tokens, start=item.start + more, output_len=item.output_len + more)

    def _read(self, slot: int, token: int) -> int:
        if token >= 0:
            return token
        if token >= -SLOTS:
            return self.last[-token - 1]
        number = number_of(token)
        assert placeholder(slot, number) == token, "the place of another request"
        return self.unseen[slot][number]

    def _move_accepted(self, items: list[PlanItem], results: list[ItemResult]) -> None:
        """Rows of a tree that count lie at their own places from now on."""
        for row, _, run, found in self._runs(items, results):
            accepted = list[bool]()
            for number, item in enumerate(run):
                above = number - item.behind
                accepted.append(not item.draft or (accepted[above] and found[above].token == item.tokens[0]))
            if len(run) > 1:
                self.counting[run[0].slot] = sum(accepted) - 1
                newest = max(number for number, right in enumerate(accepted) if right)
                self._keep_unseen(run[0].slot, found[newest].token, [])
            moves = [(i.place, i.start) for i, right in zip(run, accepted, strict=True) if right and i.place >= 0]
            if not moves:
                continue
            for kv, pages in ((self.kv, row), (self.window_kv, self.window_rows[run[0].slot])):
                if kv is self.kv or self.window:
                    slots = [kv[self._at(pages, place)] for place, _ in moves]
                    kv.update({self._at(pages, at): slot for slot, (_, at) in zip(slots, moves, strict=True)})
            if self.drafter is not None:
                self.drafter.move(row, moves)

    def _keep_unseen(self, slot: int, newest: int | None, drafts: list[int]) -> None:
        none = [NO_DRAFT] * (MOST_UNSEEN - len(drafts))
        self.unseen[slot] = [NO_DRAFT if newest is None else newest, *drafts, *none]

    def _runs(
        self, items: list[PlanItem], results: list[ItemResult]
    ) -> list[tuple[list[int], int, list[PlanItem], list[ItemResult]]]:
        """Of each request: its row, what its hashes begin from, and its items with their results."""
        runs: list[tuple[list[int], int, list[PlanItem], list[ItemResult]]] = []
        for item, result in zip(items, results, strict=True):
            if item.draft:
                runs[-1][2].append(item)
                runs[-1][3].append(result)
            else:
                runs.append((self.rows[item.slot], self.weights + self.adapters[item.slot], [item], [result]))
        return runs

    def features_of(self, image: ImageInput) -> list[int]:
        """As `key_ids` of its tokens, wherever it stands."""
        return key_ids([image], [0] * image.num_tokens, image.start)

    def seen(self, item: PlanItem, tokens: list[int]) -> list[int]:
        """What the model computes KV of: features in place of tokens of images."""
        found = list(tokens)
        for part in () if item.images is None else item.images.rows:
            assert self.encoded_by[part.key] == self.weights, "features of other weights"
            found[part.at : part.at + part.count] = self.features[part.key][part.first : part.first + part.count]
        return found

    def _land(self, land: FeatureLand) -> None:
        assert land.key not in self.features, "features land that are here already"
        places = [(page, offset) for page in land.pages for offset in range(self.page_size)][: land.num_tokens]
        slots = [self.arrivals[place] for place in places]
        (self.encoded_by[land.key],) = {slot.token for slot in slots}
        self.features[land.key] = [slot.value for slot in slots]

    def _encode(self, plan: Plan) -> None:
        for image in plan.encodes:
            assert image.key not in self.features, "an image is encoded twice"
            self.features[image.key] = self.features_of(image)
            self.encoded_by[image.key] = self.weights
        assert sum(map(len, self.features.values())) <= self.image_room, "more features than there is room for"

    def _lacks_features(self, plan: Plan) -> bool:
        """Whether a step before it that has failed was to encode an image of its own."""
        there = {*self.features, *(image.key for image in plan.encodes), *(land.key for land in plan.lands)}
        lacking = {part.key for item in plan.items if item.images for part in item.images.rows} - there
        assert not lacking or self.lost, "features of an image are gone that a step has still to read"
        return bool(lacking)

    def _begin_runs(self, plan: Plan) -> None:
        self.passed = {item.slot: {} for item in plan.items if item.draft and self.state_of[item.slot]}
        assert len(self.passed) <= self.shadows, f"drafts of {len(self.passed)} requests, and shadows of {self.shadows}"

    def _copy_states(self, copies: list[StateCopy]) -> None:
        for copy in copies:
            found = self.host_states if copy.from_host else self.states
            self.states[copy.dst] = State(0, None) if copy.src is None else found[copy.src]

    def _rubbish(self, item: PlanItem) -> ItemResult:
        row = self.rows[item.slot]
        row += item.new_pages
        self.kv.update({self._at(row, position): Slot(-1, -1) for position in range(item.start, item.kv_len)})
        if self.window:
            mine = self._grow_window(item)
            self.window_kv.update({self._at(mine, p): Slot(-1, -1) for p in range(item.start, item.kv_len)})
        if state_slot := self.state_of[item.slot]:
            self.states[state_slot] = State(-1, -1)
        return ItemResult(0 if item.sample else None)

    def _forward(self, item: PlanItem, mask: bytes | None, path: list[int]) -> ItemResult:
        """`path`: where the newest tokens before the item's lie."""
        if item.slot in self.lost:
            return self._rubbish(item)
        row = self.rows[item.slot]
        assert len(row) == item.page_start
        row += item.new_pages
        if item.to_draft:
            assert self.drafter is not None, "a plan asks a drafter, and there is none"
            self.read(row, item.start, adapter=self.adapters[item.slot])
            seed = self.weights + self.adapters[item.slot]
            drafted = self.drafter.draft(item, row, seed)
            self._keep_unseen(item.slot, None, [guess.token for guess in drafted])
            return ItemResult(None, drafted=drafted)
        given = [t if t >= 0 else self.last[-t - 1] for t in item.tokens]
        tokens = self.seen(item, given)
        values = [self.read(row, item.start, adapter=self.adapters[item.slot], path=path)]
        if state_slot := self.state_of[item.slot]:
            before = State(item.start, values[0] if item.start else None)
            assert self.states[state_slot] == before, (
                f"the state of other tokens: {self.states[state_slot]}, not {before}"
            )
        for position, token in enumerate(tokens, item.start):
            values.append(step_hash(values[-1], token))
            self.kv[self._at(row, position if item.place < 0 else item.place)] = Slot(values[-1], token)
        if self.window:
            self._read_and_write_window(item, path)
        if state_slot:
            self.states[state_slot] = State(item.kv_len, values[-1])
            if item.slot in self.passed:
                self.passed[item.slot][item.kv_len] = self.states[state_slot]
        result = ItemResult(None, input_logprobs=_input_logprobs(item, given, values), hidden=_hidden(item, values))
        if item.sample:
            result.token = self.last[item.slot] = next_token(values[-1], mask)
            result.bad = self.gives_nan and is_bad(values[-1])
            if item.logprobs is not None:
                result.logprob = TokenLogprob(logprob_of(values[-1], result.token), result.token)
        return result

    def _read_and_write_window(self, item: PlanItem, path: list[int]) -> None:
        """All that the queries of the step read is what the tokens left; then their own."""
        row, mine = self.rows[item.slot], self._grow_window(item)
        places = [*range(item.start - len(path)), *path]
        for position in places[max(0, item.start - self.window + 1) :]:
            found, right = self.window_kv[self._at(mine, position)], self.kv[self._at(row, position)]
            assert found == right, f"other KV in the window at position {position}"
        for position in range(item.start, item.kv_len) if item.place < 0 else (item.place,):
            assert self._at(mine, position)[0], f"no page of the window at position {position}"
            self.window_kv[self._at(mine, position)] = self.kv[self._at(row, position)]

    def _grow_window(self, item: PlanItem) -> list[int]:
        mine = self.window_rows[item.slot]
        assert len(mine) == item.window_start
        mine += item.new_window
        return mine

    def _copy_pages(self, plan: Plan) -> None:
        if self.drafter is not None:
            self.drafter.copy_pages(plan)
        for out in plan.states_to_host:
            self.host_states[out.host_page] = self.states[out.page]
        for out in plan.to_host:
            self.host[out.host_page] = [self.kv[out.page, o] for o in range(self.page_size)]
        for back in plan.from_host:
            self.kv.update({(back.page, o): v for o, v in enumerate(self.host[back.host_page])})
        for key in plan.drops:
            del self.copies[key]
        for load in plan.loads:
            copy = self.copies.pop(load.key)
            self._write_pages(self.kv, load.pages, copy.pages[load.start : load.start + len(load.pages)])
            self._write_pages(self.window_kv, load.window, copy.window)
            if load.state:
                assert copy.state is not None
                self.states[load.state] = copy.state
        for save in plan.saves:
            self.copies[save.key] = Copy(
                self._read_pages(self.kv, save.pages),
                self._read_pages(self.window_kv, save.window),
                self.states[save.state] if save.state else None,
            )

    def _read_pages(self, kv: KV, pages: list[int]) -> list[list[Slot | None]]:
        return [[kv.get((page, o)) for o in range(self.page_size)] for page in pages]

    def _write_pages(self, kv: KV, pages: list[int], found: list[list[Slot | None]]) -> None:
        for page, slots in zip(pages, found, strict=True):
            kv.update({(page, o): v for o, v in enumerate(slots) if v is not None})

    def _at(self, row: list[int], position: int) -> tuple[int, int]:
        return row[position // self.page_size], position % self.page_size

    def read(self, row: list[int], end: int, *, adapter: int = 0, path: Sequence[int] = ()) -> int:
        """The hash at end - 1, which vouches for what stands before it: every slot must follow from the one before.

        `path`: where the last ones lie.
        """
        value = self.weights + adapter
        for position in [*range(end - len(path)), *path]:
            slot = self.kv[self._at(row, position)]
            value = step_hash(value, slot.token)
            assert slot.value == value, f"wrong KV at position {position}"
        return value

    def write(
        self,
        pages: list[int],
        tokens: list[int],
        *,
        state: int = 0,
        window: Sequence[int] = (),
        adapter: int = 0,
    ) -> None:
        """As a transfer does: KV of `tokens` into `pages`, slot `state` and the last window in `window`, behind the back of the stream."""
        if state:
            self.states[state] = State(len(tokens), prefix_hash(tokens, self.weights + adapter))
        value = self.weights + adapter
        for position, token in enumerate(tokens):
            value = step_hash(value, token)
            self.kv[self._at(pages, position)] = Slot(value, token)
            in_window = position // self.page_size >= max(0, len(tokens) - self.window + 1) // self.page_size
            if window and in_window and (at := self._at(list(window), position))[0]:
                self.window_kv[at] = Slot(value, token)
        if self.drafter is not None:
            self.drafter.write(pages, len(tokens))

    def verify_window(self, pages: list[int], window: list[int]) -> None:
        """Every page in `window` (0: gone) holds what the page beside it holds."""
        for page, beside in zip(pages, window, strict=False):
            for offset in range(self.page_size if beside else 0):
                found, right = self.window_kv.get((beside, offset)), self.kv[page, offset]
                assert found == right, f"page {beside} of a window holds {found}, not {right}"

    def verify_state(self, slot: int, tokens: list[int], *, adapter: int = 0) -> None:
        right = State(len(tokens), prefix_hash(tokens, self.weights + adapter))
        assert self.states[slot] == right, f"the state of other tokens: {self.states[slot]}, not {right}"

    def verify(self, pages: list[int], tokens: list[int], *, adapter: int = 0) -> None:
        """Every slot of `pages` holds the prefix hash of `tokens`."""
        found = self.read(pages, len(tokens), adapter=adapter)
        assert found == prefix_hash(tokens, self.weights + adapter), "the KV of another prompt"


class LanesModel(HashModel):
    """The executors of two lanes: what they know of rows is their own, and they share the KV."""

    OWN = ("rows", "window_rows", "adapters", "state_of", "last", "lost")

    def __init__(self, *, page_size: int) -> None:
        super().__init__(page_size=page_size)
        self._own: dict[Phase | None, dict[str, object]] = {
            phase: {name: type(getattr(self, name))() for name in self.OWN} for phase in Phase
        }

    def run(self, plan: Plan) -> StepResult:
        assert plan.phase is not None, "a plan without a phase"
        vars(self).update(self._own[plan.phase])
        return super().run(plan)


def _paths(items: list[PlanItem]) -> list[list[int]]:
    """Of each item, where the drafts lie that it follows."""
    paths = list[list[int]]()
    for i, item in enumerate(items):
        above = i - item.behind
        own = [] if not items[above].draft else [items[above].start if items[above].place < 0 else items[above].place]
        paths.append([*paths[above], *own] if item.draft else [])
    return paths


def _input_logprobs(item: PlanItem, tokens: list[int], values: list[int]) -> list[TokenLogprob]:
    """values[i]: the prefix before tokens[i]."""
    if item.logprob_from is None:
        return []
    tokens = tokens if item.logprob_next is None else [*tokens, item.logprob_next]
    at = range(item.logprob_from - item.start, len(tokens))
    return [TokenLogprob(logprob_of(values[i], tokens[i]), tokens[i]) for i in at]


def _hidden(item: PlanItem, values: list[int]) -> bytes:
    if item.hidden_from is None:
        return b""
    rows = [hidden_of(value) for value in values[1 + item.hidden_from - item.start :]]
    if item.pool == "last":
        rows = rows[-1:]
    elif item.pool == "mean":
        rows = [[sum(column) for column in zip(*rows, strict=True)]]
    return array.array("f", [x for row in rows for x in row]).tobytes()
