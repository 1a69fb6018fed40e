"""Shared state of the scheduler: live requests by stage, slots, micro-batches, counters.

add ---> waiting ---> chunked / running ---> (ended) ---> draining ---> gone
            ^                |                               |
            +--- retracted --+              held: the role decides when its memory goes
                                leaving: a step in flight --+
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.estimates import NewTokenRatio, OutputLengthEstimator
from engine.core.mem_cache.memory_part import Features, LowerTier, RetractedKV, StepEnds
from engine.core.memory import Memory
from engine.core.outputs import refusal
from engine.core.plan import Phase, Plan, PlanItem
from engine.core.policy import Limits
from engine.core.request import Request
from engine.images import rope_delta
from engine.messages import FinishReason

# ---- Live requests by stage, the only place of stage changes.


class Stages:
    """`batch_is_full`: the last waiting request had no room, and nothing was freed since."""

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}  # in order of arrival
        self.chunked: Request | None = None  # the prompt in chunks
        self.running: list[Request] = []
        self.draining: list[Request] = []  # finished or retracted, a step in flight
        self.leaving: list[Request] = []  # for another worker, a step in flight
        self.held: list[Request] = []  # by the role: KV is handed over, or comes from elsewhere
        self.newly_retracted: list[Request] = []  # held ones that the role has not taken
        self.short: list[Request] = []  # held ones whose KV had no room here when it could come
        self.batch_is_full = False

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self._chunked)

    @property
    def _chunked(self) -> list[Request]:
        return [] if self.chunked is None else [self.chunked]

    def register(self, request: Request, *, serial: int) -> None:
        assert request.rid not in self.live
        self.live[request.rid] = request
        request.serial = serial

    def unstage(self, request: Request) -> None:
        if request is self.chunked:
            self.chunked = None
            return
        if self.waiting.pop(request.rid, None) is not None:
            return
        for stage in (self.running, self.draining, self.leaving):
            if request in stage:
                stage.remove(request)
                return
        raise AssertionError(f"{request.rid} is in no stage")

    def requeue(self, request: Request) -> None:
        self.waiting = {r.rid: r for r in sorted([request, *self.waiting.values()], key=lambda r: r.serial)}

    def take_computing(self) -> list[Request]:
        """Remove computing requests, except a prompt in handover: a peer reads it."""
        taken, self.running = self.running, []
        if self.chunked is not None and not self.chunked.prefill_only:
            taken.append(self.chunked)
            self.chunked = None
        return taken

    def take_settled(self) -> list[Request]:
        settled = [r for r in self.draining if r.inflight == 0]
        self.draining = [r for r in self.draining if r.inflight > 0]
        return settled

    def take_departed(self) -> list[Request]:
        departed = [r for r in self.leaving if r.inflight == 0]
        self.leaving = [r for r in self.leaving if r.inflight > 0]
        return departed

    def growing(self) -> list[Request]:
        coming = [r for r in self.held if not r.prefill_only and not r.moves and r.pages and not r.ended]
        return self.running + self._chunked + coming

    @property
    def retraction_pending(self) -> bool:
        """The next collected step frees a retracted request."""
        return any(not r.ended for r in self.draining)

    def retracted(self) -> list[Request]:
        """Requests that wait for memory or for KV from elsewhere."""
        waiting = [r for r in self.waiting.values() if r.stats.retractions > 0]
        elsewhere = [r for r in self.held if r.stats.retractions > 0 and not r.pages and not r.ended]
        return [*waiting, *(r for r in self.draining if not r.ended), *elsewhere]

    def all(self) -> list[Request]:
        waiting = self.waiting.values()
        return [*waiting, *self.running, *self.draining, *self.leaving, *self.held, *self._chunked]

    def check(self) -> None:
        assert sorted(r.rid for r in self.all()) == sorted(self.live), "a live request is in no stage, or in two"
        assert all(r in self.held for r in self.short), "a request that has left still waits for memory"
        for request in self.all():
            assert 0 <= request.pending <= request.inflight
            assert request.computed_len <= request.launched_len


def check_reads(request: Request, start: int, end: int) -> None:
    """Check that tokens start..end-1 are known, or end with the cell's.

    The device has one cell per slot (engine/executor/step_part.py). Steps run in plan order, reads
    before writes. One cell suffices if each step that samples over a sample in flight also reads
    it, and slots change owner with nothing in flight.

        token at position   known-1 | known ... known+pending-2 | known+pending-1 | not planned
                            on host | in flight and read already | in flight, in the cell
    """
    known, pending = request.num_tokens, request.pending
    if pending == 0:
        assert end <= known, (
            f"{request.rid}: position {end - 1} is read, and only {known} tokens are known or in flight"
        )
    else:
        last = known + pending - 1
        assert (start, end) == (last, last + 1), f"{request.rid}: positions {start}..{end - 1}, the cell holds {last}"


def check_no_future(request: Request) -> None:
    assert request.pending == 0, f"{request.rid}: its slot is given back with {request.pending} samples in flight"


# ---- Slots of running requests, for the executor's per-slot state.


class RequestTable:
    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1
        self._rows: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._closed: dict[Phase | None, list[int]] = {}  # since the stream's last plan

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, request: Request) -> int:
        assert self._free, "no slot is free"
        assert request.slot is None, f"{request.rid} has slot {request.slot} already"
        slot = self._free.pop()
        self._rows[slot] = request
        request.slot, request.phase, request.num_synced_pages, request.windows.num_synced = slot, None, 0, 0
        return slot

    def reopen(self, request: Request) -> int:
        """Move the row to another stream; no step may be in flight."""
        slot = request.slot
        assert slot is not None and request.inflight == 0, (
            f"{request.rid}: its row changes streams under a step in flight"
        )
        self._closed.setdefault(request.phase, []).append(slot)
        request.phase, request.num_synced_pages, request.windows.num_synced = None, 0, 0
        return slot

    def close(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None and self._rows[slot] is request
        check_no_future(request)
        self._rows[slot] = None
        self._free.append(slot)
        request.slot = None
        self._closed.setdefault(request.phase, []).append(slot)

    def take_closed(self, phase: Phase | None = None) -> list[int]:
        return self._closed.pop(phase, [])

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free)
        for slot, request in enumerate(self._rows):
            assert (request is None) == (slot in self._free)
            assert request is None or request.slot == slot
        for closed in self._closed.values():
            assert len(set(closed)) == len(closed), "a row is closed twice"


# ---- Pipeline parallelism: division of running requests among plans in flight.
#
#   stage 0   | A B | C D | A B | C D |          A..D running, two stages: two micro-batches
#   stage 1         | A B | C D | A B | C D |    A and B's plan follows stage 1's samples
#
# Decodes wait for their sample, so plans have no placeholders. Chunks of a prompt follow at once.
# Plans take even shares, so that no stage idles. After SGLang's pp_loop_size.


class MicroBatches:
    """`num` plans share the running requests; 1 decodes all, ahead of samples."""

    def __init__(self, num: int) -> None:
        assert num >= 1
        self._num = num
        self._in_flight = 0  # plans with decodes

    def ready(self, running: Iterable[Request]) -> list[Request]:
        return [r for r in running if r.samples_left > 0 and (self._num == 1 or r.pending == 0)]

    def share(self, num_ready: int, *, num_running: int) -> int:
        """Number of decodes for the next plan: at most an even part, so groups even out."""
        if self._num == 1:
            return num_ready
        left = self._num - self._in_flight
        return min(-(-num_running // self._num), -(-num_ready // left)) if left > 0 else 0

    def on_planned(self, plan: Plan) -> None:
        if self._num > 1:
            assert all(item.tokens[0] >= 0 for item in plan.items), "a placeholder between pipeline stages"
            self._in_flight += _decodes(plan.items)

    def on_collected(self, plan: Plan) -> None:
        if self._num > 1:
            self._in_flight -= _decodes(plan.items)

    def check(self, *, idle: bool) -> None:
        assert self._in_flight >= 0 and not (idle and self._in_flight), (
            f"{self._in_flight} plans with decodes in flight"
        )


def _decodes(items: Iterable[PlanItem]) -> bool:
    return any(not item.extend for item in items)


# ---- Shared scheduler state, each piece with its owner.


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    retractions: int = 0
    out_of_memory: int = 0  # of them, for others' extension
    out_of_memory_tokens: int = 0  # tokens whose KV these gave up
    preemptions: int = 0
    resumed_computed: int = 0  # retracted requests recomputed here
    resumed_restored: int = 0  # ... restored from the host
    steps: int = 0
    prefill_steps: int = 0  # of them, with prompt chunks
    mixed_steps: int = 0  # of these, with decodes riding along
    wasted_samples: int = 0  # for finished requests
    failed_steps: int = 0  # out of device memory; their requests were aborted
    joined_steps: int = 0  # with work only on other DP attention ranks
    delayed_steps: int = 0  # whose prompts waited for other ranks' prompts
    deferred_samples: int = 0  # whose sampling waited for masks
    draft_steps: int = 0  # only of the executor's drafter
    verify_steps: int = 0  # decode steps with drafts
    verified_runs: int = 0  # requests with drafts, per step
    drafts: int = 0  # draft tokens collected
    accepted_drafts: int = 0  # of them
    wrong_drafts: int = 0  # of them, wrong after right ones


class SchedulerState:
    """State that the scheduler's parts share."""

    def __init__(self, *, limits: Limits, memory: Memory, ratio: NewTokenRatio | None = None) -> None:
        self.limits = limits
        self.memory = memory
        self.ratio = ratio or NewTokenRatio()
        self.growth = OutputLengthEstimator()  # from finished answers
        self.stages = Stages()
        self.micro_batches = MicroBatches(limits.micro_batches)
        self.table = RequestTable(limits.max_running_requests)
        self.backups = memory.of(RetractedKV)
        self.step_ends = memory.having(StepEnds)
        self.features = memory.of(Features)
        self.lower_tiers = memory.having(LowerTier)
        self.counters = Counters()

    def register(self, request: Request) -> None:
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.input_ids)
        if request.images:
            request.vision.rope_delta = rope_delta(request.images)
        self.stages.register(request, serial=self.counters.requests)

    def pages_before(self, request: Request, others: Iterable[Request]) -> int:
        """Pages for the first of `others` if it precedes `request`."""
        first = min(others, key=self._turn, default=request)
        if self._turn(first) >= self._turn(request):
            return 0
        return self.memory.allocator.pages_for(first.num_tokens) - len(self.memory.match_prefix(first).pages)

    def _turn(self, request: Request) -> tuple[int, int]:
        return -self.limits.priorities.rank(request), request.serial

    def refusal(self, request: Request) -> FinishReason | None:
        limits = self.limits
        if request.message.lora and not request.variant.number:
            message = "lora_path: this server was started without --enable-lora"
            return FinishReason(kind="abort", message=message, status=400, field="lora_path")
        if request.rid in self.stages.live:
            return refusal(f"rid: a request with id {request.rid!r} is running", status=400)
        if not request.input_ids:
            return refusal("input_ids: the prompt is empty", status=400)
        if len(self.stages.live) >= limits.max_queued_requests + limits.max_running_requests:
            return refusal(f"the queue is full ({limits.max_queued_requests} requests)", status=503)
        allocator = self.memory.allocator
        if allocator.pages_for(len(request.input_ids) + request.max_new_tokens) > allocator.num_pages:
            return refusal(
                f"max_new_tokens: prompt ({len(request.input_ids)} tokens) plus max_new_tokens "
                f"({request.max_new_tokens}) exceeds the KV capacity of {allocator.num_pages * allocator.page_size}",
                status=400,
            )
        if reason := self.memory.refusal(request, part_tokens=limits.part_tokens):
            return reason
        if request.images and not self.features.sees_images:
            return refusal("images: the model of this worker sees none; send text alone", status=400)
        return None

    def check(self) -> None:
        """Check that held pages have one owner each, and the adapter limit."""
        allocator, requests = self.memory.allocator, self.stages.all()
        held = [p for r in requests for p in r.own_pages()]
        assert len(held) == len(set(held)) == allocator.counts()["held"], "held pages and owners differ"
        self.micro_batches.check(idle=not self.stages.live)
        adapters = {r.variant.number for r in self.stages.growing()} - {0}
        assert len(adapters) <= self.limits.max_loras_per_batch, "more adapters run than a batch may hold"
        for r in requests:
            assert r.launched_len <= len(r.pages) * allocator.page_size, f"{r.rid} has fewer pages than tokens in them"
