"""Choice of prompts and chunks for the next step.

The chunked request continues first, then waiting ones in policy order within budgets
(PrefillAdder). Requests are skipped while prefix or image features load or transfer, image features
or adapter lack room, or another computes a shared prefix (SharedWork).
"""

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import chain, islice

from engine.core.decode_planning import open_slot, plan_item
from engine.core.estimates import StepBudget
from engine.core.mem_cache.radix_cache import Branch, equal_pages
from engine.core.memory import Memory, growth_pages, match_limit
from engine.core.plan import PlanItem, SlotOpen
from engine.core.policy import TAIL_SHARE, Uniform, order
from engine.core.preemption import Preemption
from engine.core.request import Request
from engine.core.state import SchedulerState

# ---- Token budgets of a prefill step, and remaining memory. After SGLang's PrefillAdder.
#
# input budget   max_prefill_tokens per step (the first prompt may exceed it)
# chunk budget   chunked_prefill_size per step; longer prompts are cut at pages (`Limits.grid`),
#                but last chunks may be a 16th longer
# work budget    tokens within --max-step-time (engine/core/estimates.py), cut likewise
#                encoded images cost their tokens in all budgets
# memory         free + evictable pages, less expected pages of running requests and this step's


class AddResult(Enum):
    """NO_TOKEN: no memory or batch full. OTHER: over the step's budget."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    OTHER = "other"


class PrefillAdder:
    """Fills one step with `decode_tokens` of mixed decodes."""

    def __init__(
        self,
        state: SchedulerState,
        *,
        growing: Iterable[Request],
        decode_tokens: int = 0,
        budget: StepBudget | None = None,
    ) -> None:
        self._limits = limits = state.limits
        self._memory = state.memory
        self._step_ends = state.step_ends
        self._features = state.features
        self._ratio = ratio = state.ratio
        self._input_left = limits.max_prefill_tokens - decode_tokens
        chunk = limits.chunked_prefill_size
        self._chunk_left = math.inf if chunk is None else self._beside(decode_tokens, chunk)
        self._budget = budget
        self._work_left = math.inf if budget is None else self._beside(decode_tokens, budget.work)
        self._pages_before = partial(state.pages_before, others=state.stages.short)
        self._growth_pages = {r.rid: self._pages(ratio.growth_tokens(r)) for r in growing}
        self._reserved_pages = sum(self._growth_pages.values())
        self.num_requests = 0

    def _beside(self, decode_tokens: int, budget: float) -> float:
        """Reserve half of the budget for prompts, so that decodes cannot starve them."""
        return max(budget - decode_tokens, budget // 2, self._limits.part_tokens)

    def add(self, request: Request) -> AddResult:
        """Admit `request` if it fits. CONTINUE: pages are allocated, call `take`."""
        if self._no_budget(request):
            return AddResult.OTHER
        if request.images and request.saved_len == 0 and not self._features.has_room(request, self._limits.part_tokens):
            return AddResult.OTHER
        reserved, lands = self.reserve_for(request, without=()), request.saved_len > 0
        if not self._memory.admit(request, reserved_pages=reserved, lands=lands):
            return AddResult.NO_TOKEN
        self._reserved_pages += self._pages(self._ratio.new_growth(request))
        return AddResult.CONTINUE

    def reserve_for(self, request: Request, *, without: Sequence[Request]) -> int:
        """Pages for `add`, besides known tokens, without `without`."""
        left = sum(self._growth_pages.get(r.rid, 0) for r in without)
        growth = self._ratio.new_growth(request)
        before = self._pages_before(request) if self._growth_pages else 0
        return growth_pages(self._memory.allocator, request, growth) + self._reserved_pages - left + before

    def forget(self, gone: Sequence[Request]) -> None:
        self._reserved_pages -= sum(self._growth_pages.pop(r.rid, 0) for r in gone)

    @property
    def exhausted(self) -> bool:
        limit = self._limits.prefill_max_requests
        left = min(self._chunk_left, self._work_left)
        return self._input_left <= 0 or left < self._limits.part_tokens or self.num_requests == limit

    def _no_budget(self, request: Request) -> bool:
        """Without chunking the whole prompt must fit, unless it is first."""
        if self.exhausted:
            return True
        whole = self._limits.chunked_prefill_size is None
        return whole and self.num_requests > 0 and request.num_tokens > self._input_left

    def take(self, request: Request) -> int:
        """Use budgets; return the prompt's new end, at least a page further."""
        start, total = request.launched_len, request.num_tokens
        left, tail = self._room(start)
        most = total
        if request.images:
            most, left = self._before_images(request, start, left)
        end = total if total - start <= left + tail else self._whole(start + int(left))
        if end > most:
            end = self._whole(most)
        for ends in self._step_ends:
            end = ends.cut(request, start, end)
        assert end > start
        if request.images:
            tokens = self._features.use(request, start, end)
            self._input_left -= tokens
            self._chunk_left -= tokens
            self._work_left -= tokens
        if self._budget is not None:
            self._work_left -= self._budget.work_of(start, end - start)
        self._input_left -= end - start
        self._chunk_left -= end - start
        self.num_requests += 1
        return end

    def _before_images(self, request: Request, start: int, left: float) -> tuple[int, float]:
        """The end by images, and the rest of `left` after encoding: at least a chunk."""
        part = self._limits.part_tokens
        budget = min(left, max(self._input_left, part))
        most, rest = self._features.reach(request, start, part=part, budget=budget)
        return most, max(left - (budget - rest), part)

    def _room(self, start: int) -> tuple[float, int]:
        """(tokens from `start`, at least a chunk; allowed excess of a last chunk)."""
        part, tail = self._limits.part_tokens, self._limits.tail_tokens
        left = max(self._chunk_left, part)
        if self._budget is None:
            return left, tail
        in_time = max(self._budget.tokens(self._work_left, start), part)
        return (left, tail) if left <= in_time else (in_time, min(tail, in_time // TAIL_SHARE))

    def _whole(self, tokens: int) -> int:
        return tokens // self._limits.part_tokens * self._limits.part_tokens

    def _pages(self, tokens: float) -> int:
        return math.ceil(tokens / self._limits.page_size)


MAX_PASSED_OVER = 32  # per step: bounds a plan's cost


class SharedWork:
    """Prefixes being computed; a prompt waits for at least `min_tokens` shared ones.

    The tree gets pages after their step: simultaneous requests would each compute a common prefix.
    Like SGLang's in-batch prefix caching, for any policy.
    """

    def __init__(self, memory: Memory, computing: Iterable[Request], *, min_tokens: int) -> None:
        self._memory = memory
        self._min_tokens = min_tokens
        self._page_size = memory.allocator.page_size
        self._under_way: dict[tuple[Branch, tuple[int, ...]], list[Request]] = {}  # by first page
        self.num_passed_over = 0
        for request in computing:
            self.add(request)

    def add(self, request: Request) -> None:
        if (
            self._memory.cache.enabled
            and request.keep_kv
            and request.launched_len - request.computed_len >= self._min_tokens
        ):
            self._under_way.setdefault(self._first_page(request), []).append(request)

    @property
    def exhausted(self) -> bool:
        return self.num_passed_over >= MAX_PASSED_OVER

    def passes_over(self, request: Request) -> bool:
        others = self._under_way.get(self._first_page(request)) if self._under_way else None
        if not others or request.saved_len > 0:
            return False
        limit = match_limit(request)
        shared = max(self._common(request, other, min(limit, other.launched_len)) for other in others)
        if shared < self._min_tokens:
            return False
        cached = self._memory.cache.num_cached(request.key_tokens(0, limit), branch=request.branch) * self._page_size
        waits = shared - cached >= self._min_tokens
        self.num_passed_over += waits
        return waits

    def _first_page(self, request: Request) -> tuple[Branch, tuple[int, ...]]:
        return request.branch, tuple(request.key_tokens(0, min(self._page_size, request.num_tokens)))

    def _common(self, request: Request, other: Request, limit: int) -> int:
        size = self._page_size
        ours, theirs = request.key_tokens(0, limit), other.key_tokens(0, min(limit, other.num_tokens))
        return equal_pages(ours, theirs, size) * size


class PrefillPlanner:
    def __init__(
        self, state: SchedulerState, preemption: Preemption, *, uniform: Uniform, budget: StepBudget | None
    ) -> None:
        self._state = state
        self._limits = state.limits
        self._memory = state.memory
        self._stages = state.stages
        self._table = state.table
        self._preemption = preemption
        self._policy = state.limits.policy
        self._priorities = state.limits.priorities
        self._uniform = uniform
        self._budget = budget

    @property
    def prefillable(self) -> bool:
        stages = self._stages
        return stages.chunked is not None or (bool(stages.waiting) and not stages.batch_is_full)

    def plan(self, now_s: float, *, admits: bool) -> tuple[list[PlanItem], list[SlotOpen]]:
        """Plan prompts and their new rows; `admits` allows waiting ones."""
        items: list[PlanItem] = []
        opens: list[SlotOpen] = []
        stages = self._stages
        if not self.prefillable or (stages.chunked is None and not admits):
            return items, opens
        adder = self._adder(now_s)
        computing = chain(stages.running, stages.held)
        shared = SharedWork(self._memory, computing, min_tokens=self._limits.min_shared_tokens)
        if stages.chunked is not None:
            chunked = stages.chunked
            if chunked.images and not self._state.features.may_go_on(chunked, self._limits.part_tokens):
                return items, opens
            items.append(self._extend(chunked, adder))
            shared.add(chunked)
        for request in self._in_order(now_s):
            if stages.chunked is not None or not admits or adder.exhausted or shared.exhausted:
                break
            if self._waits(request, now_s) or shared.passes_over(request):
                continue
            result = self._admit(request, adder, now_s)
            if result is AddResult.NO_TOKEN and not stages.retraction_pending:
                stages.batch_is_full = bool(stages.running or stages.draining or stages.held)
            if result is not AddResult.CONTINUE:
                break
            del stages.waiting[request.rid]
            self._note_admitted(request)
            opens.append(open_slot(request, self._table))
            items.append(self._restore(request) if request.saved_len > 0 else self._extend(request, adder))
            shared.add(request)
        return items, opens

    def in_order(self, now_s: float) -> list[Request]:
        return list(self._in_order(now_s))

    def _adder(self, now_s: float) -> PrefillAdder:
        riders = self._num_riders() if self._limits.mixed_chunk else 0
        return PrefillAdder(
            self._state,
            growing=self._stages.growing(),
            decode_tokens=riders,
            budget=self._budget,
        )

    def _num_riders(self) -> int:
        batches, running = self._state.micro_batches, self._stages.running
        return batches.share(len(batches.ready(running)), num_running=len(running))

    def _waiting(self) -> Iterable[Request]:
        return self._stages.waiting.values()

    def _waits(self, request: Request, now_s: float) -> bool:
        tiers = self._state.lower_tiers
        arriving = request.arriving or request.vision.num_arriving > 0
        return arriving or (len(tiers) > 0 and any(tier.awaits(request, now_s) for tier in tiers))

    def _in_order(self, now_s: float) -> Iterable[Request]:
        if self._policy == "fcfs" and not self._priorities.enabled:
            return list(islice(self._waiting(), self._limits.max_running_requests))
        return order(
            self._policy,
            self._waiting(),
            match_prefix=self._memory.match_prefix,
            shared_tokens=self._limits.sibling_tokens,
            uniform=self._uniform,
            priorities=self._priorities,
            now_s=now_s,
        )

    def _admit(self, request: Request, adder: PrefillAdder, now_s: float) -> AddResult:
        """Admit `request`, perhaps in place of victims, which may free memory later."""
        result = self._fit(request, adder, now_s)
        if result is not AddResult.NO_TOKEN:
            return result
        victims = self._preemption.make_room(request, lambda gone: adder.reserve_for(request, without=gone), row=True)
        adder.forget(victims)
        return result if not victims or self._stages.retraction_pending else self._fit(request, adder, now_s)

    def _fit(self, request: Request, adder: PrefillAdder, now_s: float) -> AddResult:
        no_row = self._table.num_free <= self._rows_of_others(request, now_s)
        return AddResult.NO_TOKEN if no_row else adder.add(request)

    def _rows_of_others(self, request: Request, now_s: float) -> int:
        """Rows that requests with KV from elsewhere wait for, and get before `request`."""
        urgency = self._priorities.urgency
        own = urgency(request, now_s), -request.serial
        return sum(r.slot is None and (urgency(r, now_s), -r.serial) > own for r in self._stages.running)

    def _note_admitted(self, request: Request) -> None:
        counters = self._state.counters
        counters.resumed_restored += request.saved_len > 0
        counters.resumed_computed += request.saved_len == 0 and request.stats.retractions > 0
        if not request.admitted:
            request.admitted = True
            request.stats.cached_tokens = request.launched_len
            counters.cached_tokens += request.launched_len

    def _extend(self, request: Request, adder: PrefillAdder) -> PlanItem:
        start, total = request.launched_len, request.num_tokens
        end = adder.take(request)
        self._memory.extend(request, end, answer=False)
        self._stages.chunked = request if end < total else None
        if end == total:
            (self._stages.held if request.prefill_only else self._stages.running).append(request)
        return plan_item(request, start, end, sample=end == total, extend=True)

    def _restore(self, request: Request) -> PlanItem:
        """Copy KV back and sample in the same step, so each retraction gains a token."""
        self._state.backups.restore(request)
        self._stages.running.append(request)
        return plan_item(request, request.launched_len, request.launched_len + 1, sample=True, extend=False)
