"""Plays a story: the production core under a role and a control that do what disagg/ and engine/loop/control.py do.

At every step every owner checks itself and every plan is judged; at the end every request has been told what the oracle
says, once, and all memory is back.
"""

from collections import Counter
from dataclasses import dataclass, field

from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.radix_cache import TRUNK, Branch, Node
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.memory import Detached
from engine.core.outputs import StepEffects, output_of
from engine.core.plan import FeatureRows, ItemImages, ItemResult, Phase, Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED
from engine.messages import LogprobOptions, TokenLogprob, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.announced import Announced
from tests.core.engine_in_a_test import EngineInATest, new_request
from tests.core.hash_model import Slot, State, is_bad, logprob_of, next_token, prefix_hash
from tests.core.named_stops import stops_of
from tests.core.proof.oracle import Wishes, turns_of, wishes_of
from tests.core.proof.story import SIZES, Ask, Event, Setup, Story
from tests.core.proof.verdict import judge
from tests.grammar.fixed import cycle

MAX_TURNS_TO_REST = 3000
OF_THE_STORY = ("role", "capacity", "chunk_pages", "gives_nan")  # the rest of a setup is the engine's


@dataclass
class Exposed:
    """Memory that a peer may write: pages, states, pages of windows."""

    pages: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Life:
    """One request. `stage`: what the role outside waits for ("": nothing). `exposed`: what a peer knew and may write, whatever the core
    keeps in quarantine. `since`, `weights`: as the oracle has them.
    """

    ask: Ask
    wishes: Wishes
    request: Request
    stage: str = ""
    answer: TokenOutput | None = None
    exposed: Exposed = field(default_factory=Exposed)
    quarantined: Detached = field(default_factory=Detached)
    since: list[int] = field(default_factory=lambda: [0])
    weights: list[int] = field(default_factory=list)


class Driver(EngineInATest):
    def __init__(self, setup: Setup) -> None:
        super().__init__(
            num_pages=setup.capacity // setup.page_size,
            peers_write=setup.role == "decode",
            chunk=None if setup.chunk_pages is None else setup.chunk_pages * setup.page_size,
            **{name: value for name, value in vars(setup).items() if name not in OF_THE_STORY},  # type: ignore[arg-type]
        )
        self.setup = setup
        self.model.gives_nan = setup.gives_nan
        self.depth += self.scheduler.limits.micro_batches - 1
        self.lives: dict[str, Life] = {}
        self.held: list[Ask] = []  # by the control
        self.paused = False
        self.pause_mode = ""  # asked for, not done
        self.updating = False
        self.updates = 0
        self.branch_of: dict[int, Branch] = {}  # of each page's KV
        self.announced = Announced()
        self.beside = 0  # steps launched while the other phase had one
        self.piped = 0  # steps with decodes, planned while all other stages had theirs
        self.encoded = 0  # images, each time

    def tell(self, event: Ask | Event) -> None:
        if isinstance(event, Ask):
            self.held.append(event)
            self._release_held()
        elif event.kind == "turns":
            for _ in range(event.n):
                self.turn()
        elif event.kind in ("abort", "abort-retracted"):
            living = [rid for rid in self.lives if rid not in self.finish]
            if event.kind == "abort-retracted":
                living = [rid for rid in living if self.scheduler.stages.waiting.get(rid) and self._retracted(rid)]
            if living:
                self._abort(self.lives[living[event.n % len(living)]])
        elif event.kind == "move":
            staged = [life for life in self.lives.values() if life.stage]
            if staged:
                self._move(staged[event.n % len(staged)])
        elif event.kind == "flush":
            self._flush()
        elif event.kind == "update":
            self.updating = True
        elif event.kind == "continue":
            self.paused, self.pause_mode = False, ""
        else:
            self._pause(event.kind.removeprefix("pause-"))

    def _retracted(self, rid: str) -> bool:
        return self.lives[rid].request.stats.retractions > 0

    def come_to_rest(self) -> None:
        self.paused, self.pause_mode = False, ""
        for _ in range(MAX_TURNS_TO_REST):
            worked = self.turn()
            staged = [life for life in self.lives.values() if life.stage]
            for life in staged:
                self._move(life)
            if not (worked or staged or self.held or self.launched) and self.scheduler.idle:
                return
        stages = {rid: life.stage for rid, life in self.lives.items() if rid not in self.finish}
        raise AssertionError(f"no rest: {stages}, {self.scheduler.memory.allocator.counts()}")

    def _release_held(self) -> None:
        if self.paused or self.updating:
            return
        asks, self.held = self.held, []
        for ask in asks:
            self._arrive(ask)

    def _arrive(self, ask: Ask) -> None:
        role = self.setup.role
        pooling = ask.pooling if role != "decode" else ""
        prefill_only = role == "prefill" and not pooling
        allocator = self.scheduler.memory.allocator
        whole = allocator.num_pages * allocator.page_size - ask.length
        new = 0 if pooling else whole if ask.fill else ask.new
        wishes = wishes_of(
            ask, new=min(new, 1) if prefill_only else new, gives_nan=self.setup.gives_nan, hands_on=prefill_only
        )
        sampling = SamplingParams(
            max_new_tokens=new,
            min_new_tokens=ask.min_new,
            stop=() if wishes.stop_string is None else (wishes.stop_string,),
            stop_token_ids=wishes.stop_ids,
        )
        request = new_request(
            rid=f"r{len(self.lives)}",
            input_ids=ask.prompt,
            sampling=sampling,
            stops=stops_of(sampling),
            eos_ids=wishes.eos,
            arrived_s=self.now_s,
            priority=ask.priority,
            prefill_only=prefill_only,
            grammar=None if ask.grammar is None or pooling else cycle(*ask.grammar),
            logprobs=self._logprob_options(ask),
            return_hidden_states=ask.hidden and not pooling,
            pooling=pooling,
            keep_kv=ask.keep_kv and not pooling,
            adapter=ask.adapter,
            namespace=ask.namespace,
            conversation=f"c{ask.family}" if ask.length % 3 else "",
            expected_return_s=ask.new / 2 if ask.length % 2 else None,
            images=ask.images,
        )
        life = self.lives[request.rid] = Life(ask, wishes, request, weights=[self.model.weights + ask.adapter])
        full = len(self.scheduler.stages.live) >= self.setup.max_queued + self.setup.max_running
        if role == "decode":
            reason = self.scheduler.held.adopt(request)
            life.stage = "prealloc" if reason is None else ""
            self.say([] if reason is None else [TokenOutput(rid=request.rid, new_ids=[], finish=reason)])
        else:
            self.say(self.scheduler.add(request))
            life.stage = "computing" if prefill_only and request.rid not in self.finish else ""
        self._check_refusal(life, full=full)

    def _logprob_options(self, ask: Ask) -> LogprobOptions | None:
        if ask.logprob_from is None or ask.logprob_from >= max(1, ask.length):
            return None
        return LogprobOptions(-1 if self.setup.role == "decode" else ask.logprob_from)

    def _check_refusal(self, life: Life, *, full: bool) -> None:
        allocator = self.scheduler.memory.allocator
        total = life.ask.length + life.request.max_new_tokens
        status = self.finish[life.request.rid].status if life.request.rid in self.finish else 0
        if life.ask.length == 0 or (allocator.pages_for(total) > allocator.num_pages and not full):
            assert status == 400
        elif full:
            assert status in (400, 503)
        elif self._needs_at_once(life.ask) > self.setup.image_room:
            assert status == 400
        else:
            assert status == 0, f"refused without need: {self.finish[life.request.rid]}"

    def _needs_at_once(self, ask: Ask) -> int:
        """Tokens of the images that the smallest part of its prompt may have, wherever it begins."""
        part, most = self.scheduler.limits.part_tokens, 0
        for start in range(ask.length):
            touched = {i.key: i.num_tokens for i in ask.images if i.start < start + part and i.end > start}
            most = max(most, sum(touched.values()))
        return most

    def _abort(self, life: Life) -> None:
        request = life.request
        if life.stage in ("prealloc", "transfer", "landed"):
            self.say([self.scheduler.held.end(request, ABORTED)])
            if life.stage == "prealloc":
                self.scheduler.held.release(request)
            else:
                states = [request.recurrent.slot] if request.recurrent.slot else []
                life.exposed = Exposed(request.own_pages(), states, [page for page in request.windows.pages if page])
                life.quarantined = self.scheduler.held.quarantine(request)
                self.scheduler.held.release(request)
            life.stage = "" if life.stage == "prealloc" else "quarantined"
        elif life.stage == "computed":  # its answer was held back for this
            request.finish = ABORTED
            self.say([output_of(request, [])])
            life.stage = "reading"
        elif life.stage == "computing":
            outputs = self.scheduler.abort(request.rid)
            self.say(outputs if request.finish is not None else [self.scheduler.held.end(request, ABORTED)])
            life.stage = "reading"
        else:
            self.say(self.scheduler.abort(request.rid))

    def _move(self, life: Life) -> None:
        request = life.request
        if life.stage == "prealloc":
            has_place = self.scheduler.held.adapter_has_place(request, self.now_s)
            if has_place and self._first_in_line(life) and not self.paused:
                life.stage = "transfer" if self._reserve(request) else "prealloc"
        elif life.stage == "transfer":
            self.model.write(
                request.pages,
                life.ask.read,
                state=request.recurrent.slot,
                window=request.windows.pages,
                adapter=request.variant.number,
            )
            self._note_owners()
            life.stage = "landed"
        elif life.stage == "landed":
            self.model.verify(request.pages, life.ask.read, adapter=request.variant.number)
            life.stage = ""
            self.say(self.scheduler.held.start_decoding(request, self._first_token(life), cached_tokens=0))
        elif life.stage == "quarantined":
            self._write_late(life.exposed)
            self.scheduler.held.end_quarantine(life.quarantined)
            life.stage = ""
        elif life.stage in ("computed", "reading"):
            self.model.verify(request.pages, life.ask.read[: request.computed_len], adapter=request.variant.number)
            if request.recurrent.slot and life.stage == "computed":
                self.model.verify_state(request.recurrent.slot, life.ask.read, adapter=request.variant.number)
            if life.answer is not None and life.stage == "computed":
                self.say([life.answer])
            self.scheduler.held.release(request)
            life.stage = ""

    def _write_late(self, exposed: Exposed) -> None:
        """A peer writes what it was given, which therefore no other request can get."""
        memory, offsets = self.scheduler.memory, range(self.setup.page_size)
        self.model.kv.update({(page, offset): Slot(7, 7) for page in exposed.pages for offset in offsets})
        self.model.window_kv.update({(page, offset): Slot(7, 7) for page in exposed.windows for offset in offsets})
        self.model.states.update({slot: State(7, 7) for slot in exposed.states})
        lists = [(memory.allocator, exposed.pages)]
        states, windows = memory.part(StateSlots), memory.part(WindowPages)
        lists += [] if states is None else [(states.allocator, exposed.states)]
        lists += [] if windows is None else [(windows.allocator, exposed.windows)]
        for allocator, numbers in lists:
            free = [number for number in numbers if allocator.state_of(number) != "quarantined"]
            assert not free, f"a peer may still write {free}, which others can get"

    def _spoil_free(self) -> None:
        """Write into free pages, as a peer of their next owner may while a step in flight has not run yet."""
        if not (self.setup.lag and self.launched):
            return
        memory = self.scheduler.memory
        pools = [(memory.allocator, self.model.kv)]
        windows = memory.part(WindowPages)
        pools += [] if windows is None else [(windows.allocator, self.model.window_kv)]
        for allocator, kv in pools:
            free = [page for page in range(1, allocator.num_pages + 1) if allocator.state_of(page) == "free"]
            kv.update({(page, offset): Slot(7, 7) for page in free for offset in range(self.setup.page_size)})

    def _first_in_line(self, life: Life) -> bool:
        def urgency(request: Request) -> float:
            return self.scheduler.limits.priorities.urgency(request, self.now_s)

        others = [other.request for other in self.lives.values() if other.stage == "prealloc"]
        first = max(others, key=urgency)  # of equals the one that came first
        return first is life.request and all(urgency(first) > urgency(r) for r in self.scheduler.stages.retracted())

    def _reserve(self, request: Request) -> bool:
        preemptions, running = self.scheduler.counters.preemptions, self._with_rows()
        reserved = self.scheduler.held.reserve(request, may_preempt=True)
        if self.scheduler.counters.preemptions > preemptions:
            assert reserved or self.scheduler.stages.retraction_pending, "preempted in vain"
            self._check_preemption(running, set())
        return reserved

    def _first_token(self, life: Life) -> ItemResult:
        request = life.request
        value = prefix_hash(life.ask.read, self.model.weights + request.variant.number)
        token = next_token(value, request.grammar.bitmask() if request.grammar is not None else None)
        said = TokenLogprob(logprob_of(value, token), token) if request.logprobs is not None else None
        return ItemResult(token, logprob=said, bad=self.setup.gives_nan and is_bad(value))

    def on_step(self, effects: StepEffects) -> None:
        self.say(effects.outputs)
        page_size = self.setup.page_size
        for request in effects.progressed:
            whole = request.computed_len // page_size
            tokens = [*self.lives[request.rid].ask.read, *request.output_ids][: whole * page_size]
            self.model.verify(request.pages[:whole], tokens, adapter=request.variant.number)
        for request, output, _ in effects.prefilled:
            self.lives[request.rid].answer, self.lives[request.rid].stage = output, "computed"

    def _pause(self, mode: str) -> None:
        if self.pause_mode:
            return  # one is being paused already
        self.paused, self.pause_mode = True, mode
        if mode == "abort":
            for life in [life for rid, life in self.lives.items() if rid not in self.finish]:
                self._abort(life)
            self.held.clear()

    def _flush(self) -> None:
        before = self.scheduler.memory.cache.num_pages
        flushed = self.scheduler.flush_cache()
        assert flushed == self.scheduler.idle
        assert self.scheduler.memory.cache.num_pages == (0 if flushed else before)

    def _control(self) -> None:
        if not self.launched:
            if self.pause_mode == "retract":
                self.scheduler.retract_all()
            self.pause_mode = ""
            self._update_weights()
        self._release_held()

    def _update_weights(self) -> None:
        if not self.updating:
            return
        if self.paused and not self.scheduler.holds_no_kv:
            self.scheduler.retract_all()
        if not self.scheduler.holds_no_kv:
            self.updating = not self.paused  # refused, or it waits until they are done
            return
        self.scheduler.forget_prefixes()
        self.updating = False
        self.updates += 1
        self.model.weights += 1
        for rid, life in self.lives.items():
            if rid not in self.finish:
                life.since.append(len(life.request.output_ids))
                life.weights.append(self.model.weights + life.ask.adapter)

    def turn(self) -> bool:
        self.now_s += 1.0
        self._control()
        worked = super().turn()
        self._spoil_free()
        if (events := self.events.take()) or not worked:
            self.announced.read(events)
            self.announced.check(self.scheduler.memory)
        return worked

    def next_plan(self) -> Plan | None:
        if self.paused:
            return None
        counters, running, num_running = self.scheduler.counters, self._with_rows(), len(self.scheduler.stages.running)
        preemptions, out_of_memory = counters.preemptions, counters.out_of_memory
        plan = super().next_plan()
        self._check_micro_batch(plan, num_running=num_running)
        if counters.preemptions > preemptions and counters.out_of_memory == out_of_memory:
            grown = [page for item in plan.items if not item.extend for page in item.new_pages] if plan else []
            self._check_preemption(running, set(grown))
        return plan

    def _check_micro_batch(self, plan: Plan | None, *, num_running: int) -> None:
        """Pipeline stages: each has its part of the decodes, no request is in two plans, chunks follow one another at once."""
        num = self.scheduler.limits.micro_batches
        if plan is None:
            chunked = None if self.phase is Phase.DECODE else self.scheduler.stages.chunked
            assert chunked is None or chunked.images, "a chunk waits for the one before it"
        elif num > 1:
            sampling = {item.rid for launched, _ in self.launched for item in launched.items if item.sample}
            assert not sampling & {item.rid for item in plan.items}, "a request is planned twice in flight"
            assert all(token >= 0 for item in plan.items for token in item.tokens), "a placeholder"
            num_running += sum(item.extend and item.sample for item in plan.items)
            decodes = sum(not item.extend for item in plan.items) - len(plan.loads)
            assert decodes <= -(-num_running // num), f"{decodes} of {num_running} decodes in one of {num} plans"
            self.piped += len(self.launched) >= num - 1 and decodes > 0

    def _with_rows(self) -> list[Request]:
        return [r for r in self.scheduler.stages.running if r.slot is not None]

    def _check_preemption(self, before: list[Request], grown: set[int]) -> None:
        """A request that has priority over each victim fits beside those that stay: counted page by page.

        `grown`: pages that the plan took afterwards.
        """
        stages, priorities = self.scheduler.stages, self.setup.priorities
        victims = [r for r in before if r not in stages.running and r.finish is None]
        new = [r for r in stages.all() if r not in before and all(priorities.may_preempt(r, v) for v in victims)]
        assert any(self._fits_without(request, victims, grown) for request in new), "preempted in vain"

    def _fits_without(self, request: Request, victims: list[Request], grown: set[int]) -> bool:
        stages, allocator = self.scheduler.stages, self.scheduler.memory.allocator
        leaving = [request, *victims, *stages.draining]
        kept = {page for r in stages.all() if r not in leaving for page in (*r.pages, *r.dup_pages)} - grown
        kept |= {page for life in self.lives.values() for page in life.quarantined.pages}
        shared = kept & {*(request.pages or self.scheduler.memory.match_prefix(request).pages)}
        return allocator.pages_for(request.num_tokens) - len(shared) <= allocator.num_pages - len(kept)

    def launch(self, plan: Plan) -> None:
        self._check_plan(plan)
        self.beside += any(launched.phase is not plan.phase for launched, _ in self.launched)
        super().launch(plan)

    def _check_plan(self, plan: Plan) -> None:
        """Budgets hold, nobody is computed twice, and nothing is written that is not the request's own."""
        limits, items = self.scheduler.limits, [item for item in plan.items if not item.draft]
        assert len({item.rid for item in items}) == len(items) <= limits.max_running_requests
        extends = [item for item in items if item.extend]
        assert limits.prefill_max_requests is None or len(extends) <= limits.prefill_max_requests
        if limits.chunked_prefill_size is not None and extends:
            tokens = sum(item.q_len for item in extends)
            assert tokens <= limits.chunked_prefill_size + limits.tail_tokens, f"a step of {tokens} tokens"
        self._check_images(plan)
        self._note_owners()
        adapters = {
            request.variant.number for item in items if (request := self.lives[item.rid].request).variant.number
        }
        assert len(adapters) <= limits.max_loras_per_batch, f"{len(adapters)} adapters in a step"
        for item in plan.items:
            request = self.lives[item.rid].request
            shared = request.pages[: request.shared_pages]
            assert all(self.branch_of[page] == self._branch(request) for page in shared), "KV of another namespace"
            cut = item.kv_len % limits.part_tokens != 0
            assert item.sample or item.to_draft or not cut, "a chunk ends inside a page"
            last = -(-(item.kv_len + max(0, item.to_draft - 1)) // limits.page_size)
            assert last <= len(request.pages), "drafts behind the last page"
            written = request.pages[item.start // limits.page_size : last]
            assert not item.sample or item.output_len < max(1, request.max_new_tokens), "a step past the length"
            assert set(written) <= set(request.pages[request.shared_pages :]), "a step writes into shared pages"

    def _check_images(self, plan: Plan) -> None:
        """Items have the RoPE positions of their tokens; a step encodes what the first part of each needs, and more if its chunk has room."""
        if not self.setup.image_room:
            return
        needed = dict[bytes, int]()
        for item in plan.items:
            ask = self.lives[item.rid].ask
            turns = turns_of(ask, item.kv_len)[item.start :]
            of = item.images or ItemImages()
            plain = range(item.start + of.rope_delta, item.kv_len + of.rope_delta)
            said = [(at, at, at) for at in plain] if of.rope is None else list(zip(*of.rope, strict=True))
            assert said == turns, f"{item.rid}: RoPE positions {said}, not {turns}"
            first = item.start + self.scheduler.limits.part_tokens
            needed |= {i.key: i.num_tokens for i in ask.images if i.end > item.start and i.start < first}
        chunk = self.scheduler.limits.chunked_prefill_size
        encoded = sum(image.num_tokens for image in plan.encodes if image.key not in needed)
        assert chunk is None or encoded <= chunk, f"a step encodes {encoded} tokens more than it needs"
        self.encoded += len(plan.encodes)

    def _note_owners(self) -> None:
        for request in self.scheduler.stages.all():
            self.branch_of.update(dict.fromkeys(request.own_pages(), self._branch(request)))

    def _branch(self, request: Request) -> Branch:
        """By what was asked, whatever the core makes of it."""
        ask = self.lives[request.rid].ask
        return Branch(str(ask.adapter or ""), ask.namespace)

    def _size(self, part: FeatureRows) -> int:
        """Count the tokens of its image."""
        rows, columns = SIZES[part.key[0]]
        return rows * columns

    def tally(self) -> Counter[str]:
        """What has happened, for those who count."""
        counters, plans = self.scheduler.counters, self.plans
        windows, images = self.scheduler.memory.part(WindowPages), self.scheduler.memory.part(ImageCache)
        kinds = Counter(f"end:{finish.kind}-{finish.status}" for finish in self.finish.values())
        return kinds + Counter(
            {f"role:{self.setup.role}": 1},
            steps=counters.steps,
            stories=1,
            requests=len(self.lives),
            tokens=counters.generation_tokens,
            retractions=counters.retractions,
            preemptions=counters.preemptions,
            wasted_samples=counters.wasted_samples,
            restored_tokens=self.scheduler.backups.restored_tokens,
            cached_tokens=counters.cached_tokens,
            updates=self.updates,
            accepted_drafts=counters.accepted_drafts,
            rejected_drafts=counters.drafts - counters.accepted_drafts,
            unannounced=self.announced.num_removed,
            mixed=sum(len({item.extend for item in plan.items}) == 2 for plan in plans),
            adapters_together=sum(len({self.lives[i.rid].ask.adapter for i in plan.items}) > 1 for plan in plans),
            in_namespaces=sum(bool(life.ask.namespace) for life in self.lives.values()),
            chunks=sum(not item.sample and not item.to_draft for plan in plans for item in plan.items),
            draft_steps=counters.draft_steps,
            overlapped=self.overlapped,
            piped=self.piped,
            beside=self.beside,
            masks=sum(len(plan.masks) for plan in plans),
            window_pages_retired=0 if windows is None else windows.num_retired,
            snapshots=sum(len(plan.snapshots) for plan in plans),
            begun_from_snapshots=sum(copy.src is not None for plan in plans for copy in plan.states),
            rewinds=sum(len(plan.rewinds) for plan in plans),
            encoded=self.encoded,
            feature_hits=0 if images is None else images.num_hits,
            feature_evictions=0 if images is None else images.num_evicted,
            cut_images=sum(
                part.first + part.count < self._size(part)
                for p in plans
                for i in p.items
                if i.images
                for part in i.images.rows
            ),
        )

    def check_cache(self) -> None:
        """What the radix tree promises is in its pages."""
        paths: list[tuple[Node, Branch, list[int], list[int]]] = [(self.scheduler.memory.cache.root, TRUNK, [], [])]
        while paths:
            node, above, tokens, pages = paths.pop()
            branch = node.branch or above
            adapter = int(branch.variant or 0)
            self.model.verify(pages, tokens, adapter=adapter)
            assert all(self.branch_of[page] == branch for page in node.pages), "a prefix of another namespace"
            if node.state:
                self.model.verify_state(node.state, tokens, adapter=adapter)
            self.model.verify_window(node.pages, node.window)
            paths += [(c, branch, [*tokens, *c.key], [*pages, *c.pages]) for c in node.children.values()]


def play(story: Story) -> Driver:
    """From the first event to rest, all checked; the engine as it then is."""
    driver = Driver(story.setup)
    for event in story.events:
        driver.tell(event)
    driver.check_cache()
    driver.come_to_rest()
    driver.check_cache()
    counts = driver.scheduler.memory.allocator.counts()
    assert (
        counts["held"] == counts["quarantined"] == 0 and driver.scheduler.memory.cache.num_evictable == counts["cached"]
    )
    if (states := driver.scheduler.memory.part(StateSlots)) is not None:
        left = states.allocator.counts()
        assert left["held"] == left["quarantined"] == 0, f"states are left: {left}"
    if (windows := driver.scheduler.memory.part(WindowPages)) is not None:
        assert windows.num_available == windows.allocator.num_pages, "window pages are left"
    if (images := driver.scheduler.memory.part(ImageCache)) is not None:
        images.check([])
    assert driver.model.copies == {}, "a copy of an ended request is left"
    for life in driver.lives.values():
        judge(
            life.request,
            life.ask,
            life.wishes,
            said=driver.outputs[life.request.rid],
            weights=(life.since, life.weights),
            landed=story.setup.role == "decode",
        )
    return driver
