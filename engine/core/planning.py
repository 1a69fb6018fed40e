"""Which requests compute what in the next step: prefill first, then everybody by one token, as far as memory reaches.

Depth is not its business: a second plan before the first result builds on tokens that do not exist yet (placeholders,
engine/core/plan.py). It relies only on steps running in the order in which they were planned.
"""

from collections.abc import Iterable
from itertools import chain, islice

from engine.core.adapter_budget import AdapterBudget
from engine.core.backups import Backups
from engine.core.counters import Counters
from engine.core.departures import Departures
from engine.core.futures import check_reads
from engine.core.hidden import note_launch
from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.outputs import input_logprob_part
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.core.policy import Draw, Priorities, order
from engine.core.preemption import Preemption
from engine.core.prefill_adder import AddResult, PrefillAdder
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.shared_work import SharedWork
from engine.core.stages import Stages
from engine.core.step_budget import StepBudget


class Planner:
    def __init__(
        self,
        *,
        limits: Limits,
        memory: Memory,
        stages: Stages,
        departures: Departures,
        table: RequestTable,
        backups: Backups,
        ratio: NewTokenRatio,
        counters: Counters,
        policy: str,
        priorities: Priorities | None,
        preemption: Preemption,
        draw: Draw,
        budget: StepBudget | None,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._stages = stages
        self._departures = departures
        self._table = table
        self._backups = backups
        self._ratio = ratio
        self._counters = counters
        self._policy = policy
        self._priorities = priorities
        self._preemption = preemption
        self._draw = draw
        self._budget = budget
        self._seq = 0
        self._last_was_extend = False
        self._now_s = 0.0  # of the plan that is being made

    def schedule(self, now_s: float = 0.0) -> Plan | None:
        """The next step, or None when there is nothing to do before a collect (or at all)."""
        self._now_s = now_s
        before = self._counters.retractions
        items, opens = self._draft(now_s)
        if not items and self._counters.retractions > before:  # their memory is free now
            items, opens = self._draft(now_s)
        host = self._memory.host
        if not items and not self._backups.asks_for_a_step and (host is None or not host.asks_for_a_step):
            return None
        extend = any(item.extend for item in items)
        wait, self._last_was_extend = extend and self._last_was_extend and self._limits.wait_between_prefills, extend
        draw_late = any(self._awaits_token(item) for item in items)
        self._seq += 1
        self._counters.steps += 1
        self._counters.prefill_steps += extend
        self._counters.mixed_steps += extend and not all(item.extend for item in items)
        self._counters.late_draws += draw_late
        plan = Plan(
            seq=self._seq,
            extend=extend,
            items=items,
            opens=opens,
            closes=self._table.take_closed(),
            wait=wait,
            draw_late=draw_late,
        )
        self._backups.attach(plan)
        if host is not None:
            host.attach(plan)
        return plan

    def _awaits_token(self, item: PlanItem) -> bool:
        """Whether what `item` may draw follows from a token that is still in flight."""
        request = self._stages.live[item.rid]
        return item.sample and request.grammar is not None and request.pending > 1

    def fill_masks(self, plan: Plan) -> None:
        """What the items of `plan` may draw, from the tokens known now. Call it just before the draw is launched."""
        for i, item in enumerate(plan.items):
            request = self._stages.live[item.rid]
            if item.sample and request.grammar is not None and request.finish is None:
                assert request.pending == 1, f"{request.rid}: a mask before the token it follows from"
                plan.masks[i] = request.grammar.bitmask()

    def _draft(self, now_s: float) -> tuple[list[PlanItem], list[SlotOpen]]:
        items, opens = self._plan_extend(now_s)
        if self._limits.mixed_chunk or not any(item.extend for item in items):
            decodes, opened = self._plan_decode({item.rid for item in items})
            items, opens = items + decodes, opens + opened
        return items, opens

    def _plan_extend(self, now_s: float) -> tuple[list[PlanItem], list[SlotOpen]]:
        """Prefill first: the chunked request goes on, then waiting ones in the policy's order while budgets last."""
        items: list[PlanItem] = []
        opens: list[SlotOpen] = []
        if self._stages.chunked is None and (self._stages.batch_is_full or not self._stages.waiting):
            return items, opens
        adder, adapters = self._adder(), self._stages.adapter_budget(self._limits, now_s=now_s)
        shared = SharedWork(self._memory, chain(self._stages.running, self._stages.kept))
        if self._stages.chunked is not None:
            going_on = self._stages.chunked
            items.append(self._extend(going_on, adder))
            shared.add(going_on)
        for request in self._in_order(adapters, now_s):
            if self._stages.chunked is not None or adder.exhausted or shared.exhausted:
                break
            if self._memory.awaits(request, now_s) or not adapters.has_place(request):
                continue
            if shared.passes_over(request):
                continue
            result = self._judge(request, adder)
            if result is AddResult.NO_TOKEN:
                self._note_full()
            if result is not AddResult.CONTINUE:
                break
            adapters.take(request)
            del self._stages.waiting[request.rid]
            self._note_admitted(request)
            opens.append(self._open_slot(request))
            items.append(self._restore(request) if request.saved_len > 0 else self._extend(request, adder))
            shared.add(request)
        return items, opens

    def _adder(self) -> PrefillAdder:
        riders = sum(r.draws_left > 0 for r in self._stages.running) if self._limits.mixed_chunk else 0
        return PrefillAdder(
            limits=self._limits,
            memory=self._memory,
            ratio=self._ratio,
            growing=self._stages.growing(),
            decode_tokens=riders,
            budget=self._budget,
        )

    def _in_order(self, adapters: AdapterBudget, now_s: float) -> Iterable[Request]:
        """Those whose adapter has a place in this step; who waits for one holds up nobody."""
        may_run = (r for r in self._stages.waiting.values() if adapters.has_place(r))
        if self._policy == "fcfs" and self._priorities is None:
            return list(islice(may_run, self._limits.max_running_requests))
        return order(
            self._policy,
            may_run,
            match_prefix=self._memory.match_prefix,
            draw=self._draw,
            priorities=self._priorities,
            now_s=now_s,
        )

    def _judge(self, request: Request, adder: PrefillAdder) -> AddResult:
        """Admit `request` if it fits, now or in the place of victims; those with a step in flight make room later."""
        result = self._fit(request, adder)
        if result is not AddResult.NO_TOKEN:
            return result
        victims = self._preemption.make_room(request, lambda gone: adder.reserve_for(request, without=gone), row=True)
        adder.forget(victims)
        return result if not victims or self._stages.retraction_pending else self._fit(request, adder)

    def _fit(self, request: Request, adder: PrefillAdder) -> AddResult:
        return AddResult.NO_TOKEN if self._table.num_free <= self._rows_of_others(request) else adder.add(request)

    def _rows_of_others(self, request: Request) -> int:
        """Rows that go to more urgent ones first: adopted requests that have memory and wait for one."""
        if self._priorities is None:
            return 0
        own = self._urgency(request)
        return sum(r.slot is None and self._urgency(r) > own for r in self._stages.running)

    def _note_full(self) -> None:
        """No room for the next in line: unless memory is on its way back, the batch is full until a request leaves it."""
        if not self._stages.retraction_pending:
            self._stages.batch_is_full = bool(self._stages.running or self._stages.draining or self._stages.kept)

    def _extend(self, request: Request, adder: PrefillAdder) -> PlanItem:
        """Plan as much of `request`'s known tokens as the step allows; it stays `chunked` while some are left."""
        start, total = request.launched_len, request.num_tokens
        end = adder.take(request)
        self._stages.chunked = request if end < total else None
        if end == total:
            (self._stages.kept if request.prefill_only else self._stages.running).append(request)
        return self._item(request, start, end, sample=end == total, extend=True)

    def _restore(self, request: Request) -> PlanItem:
        """Its KV comes back from the host, and it draws in the same step: whoever is retracted next, it got on by one."""
        self._backups.restore(request)
        self._stages.running.append(request)
        return self._item(request, request.launched_len, request.launched_len + 1, sample=True, extend=False)

    def _note_admitted(self, request: Request) -> None:
        self._counters.resumed_restored += request.saved_len > 0
        self._counters.resumed_computed += request.saved_len == 0 and request.retractions > 0
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = request.launched_len
            self._counters.cached_tokens += request.launched_len

    def _plan_decode(self, planned: set[str]) -> tuple[list[PlanItem], list[SlotOpen]]:
        """Every running request by one token, as far as rows and pages reach; `planned`: already part of this step."""
        ready = [r for r in self._stages.running if r.draws_left > 0 and r.rid not in planned]
        ready = self._with_rows(ready)
        self._grow(ready)
        if self._limits.max_loras_per_batch:
            ready.sort(key=lambda r: r.adapter)  # tokens of one adapter lie together: its part of the work is one slice
        opens = [self._open_slot(r) for r in ready if r.slot is None]
        items = [self._item(r, r.launched_len, r.launched_len + 1, sample=True, extend=False) for r in ready]
        return items, opens

    def _with_rows(self, ready: list[Request]) -> list[Request]:
        """More adopted requests than rows: those that have one go on, the least urgent of the others wait."""
        rowless = [r for r in ready if r.slot is None]
        if len(rowless) <= self._table.num_free:
            return ready
        rowless.sort(key=lambda r: -self._urgency(r))
        self._preemption.make_rows(rowless[self._table.num_free :])
        late = {r.rid for r in rowless[self._table.num_free :]}
        return [r for r in ready if r.rid not in late and r in self._stages.running]

    def _grow(self, ready: list[Request]) -> None:
        """A page for each request whose next token starts one. Where memory is short the last in order are retracted.

        A victim with a step in flight gives its memory back at the next collect: until then the needy sit out.
        """
        needy = sorted((r for r in ready if self._memory.needs_page(r)), key=self._retraction_order)
        for i, request in enumerate(needy):
            while request in ready and not self._memory.grow(request):
                if self._stages.retraction_pending:
                    ready[:] = [r for r in ready if r not in needy[i:]]
                    return
                victim = max(self._stages.running, key=self._retraction_order)
                self._counters.out_of_memory += 1
                self._counters.out_of_memory_tokens += victim.launched_len
                self._departures.retract(victim)
                ready[:] = [r for r in ready if r is not victim]
                self._ratio.on_retraction(self._stages.running)

    def _item(self, request: Request, start: int, end: int, *, sample: bool, extend: bool) -> PlanItem:
        assert request.slot is not None
        known = request.num_tokens
        check_reads(request, start, end)
        hidden_from = note_launch(request, start, end)
        logprob_from, logprob_next = input_logprob_part(request, start, end)
        item = PlanItem(
            rid=request.rid,
            slot=request.slot,
            tokens=request.tokens(start, end) if start < known else [-(request.slot + 1)],
            start=start,
            page_start=request.told_pages,
            new_pages=request.pages[request.told_pages :],
            sample=sample,
            output_len=len(request.output_ids) + request.pending,
            extend=extend,
            logprobs=request.logprobs,
            logprob_from=logprob_from,
            logprob_next=logprob_next,
            hidden_from=hidden_from,
            pool=request.pooling,
        )
        request.told_pages = len(request.pages)
        request.launched_len = end
        request.inflight += 1
        request.pending += sample
        return item

    def _open_slot(self, request: Request) -> SlotOpen:
        return SlotOpen(
            slot=self._table.open(request),
            sampling=request.sampling,
            prompt_ids=list(request.input_ids),
            output_ids=list(request.output_ids),
            eos_ids=tuple(sorted(request.eos_ids)),
            adapter=request.adapter,
        )

    def _retraction_order(self, request: Request) -> tuple[int, int, int, str]:
        """Victims come from the end: lowest priority first, longest output, shortest input; rid breaks ties."""
        return (-self._rank(request), len(request.output_ids), -len(request.input_ids), request.rid)

    def _rank(self, request: Request) -> int:
        return 0 if self._priorities is None else self._priorities.rank(request)

    def _urgency(self, request: Request) -> float:
        return 0.0 if self._priorities is None else self._priorities.urgency(request, self._now_s)
