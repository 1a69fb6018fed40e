"""Shared scheduler state, each piece with its owner."""

from dataclasses import dataclass

from engine.core.estimates import NewTokenRatio, OutputLengthEstimator
from engine.core.mem_cache.backups import NOTHING, Backups, CopySize
from engine.core.mem_cache.memory_part import Features, LowerTier, StepEnds, Windows
from engine.core.memory import Memory
from engine.core.micro_batches import MicroBatches
from engine.core.outputs import refusal
from engine.core.policy import Limits
from engine.core.request import Request
from engine.core.stages import RequestTable, Stages
from engine.images import rope_delta
from engine.messages import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since start, never decreasing."""

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
    """`backup_room`: for host copies of retracted KV."""

    def __init__(
        self,
        *,
        limits: Limits,
        memory: Memory,
        ratio: NewTokenRatio | None = None,
        backup_room: CopySize = NOTHING,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.ratio = ratio or NewTokenRatio()
        self.growth = OutputLengthEstimator()  # from finished answers
        self.stages = Stages()
        self.micro_batches = MicroBatches(limits.micro_batches)
        self.table = RequestTable(limits.max_running_requests)
        self.backups = Backups(room=backup_room, page_size=limits.page_size, windows=memory.of(Windows))
        self.step_ends = memory.of(StepEnds)
        self.features = memory.of(Features)
        self.lower_tier = memory.of(LowerTier)
        self.counters = Counters()

    def register(self, request: Request) -> None:
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.input_ids)
        if request.images:
            request.vision.rope_delta = rope_delta(request.images)
        self.stages.register(request, serial=self.counters.requests)

    def refusal(self, request: Request) -> FinishReason | None:
        """Return why `request` can never run here, or None."""
        limits = self.limits
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
        adapters = {r.adapter for r in self.stages.growing()} - {0}
        assert len(adapters) <= self.limits.max_loras_per_batch, "more adapters run than a batch may hold"
        for r in requests:
            assert r.launched_len <= len(r.pages) * allocator.page_size, f"{r.rid} has fewer pages than tokens in them"
