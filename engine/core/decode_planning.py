"""One token per running request, limited by rows and pages; a share of them with pipeline stages.

Drafts follow known tokens, so where they pay, decodes do not overlap: two half batches would read
the weights twice. The executor's drafter runs in a step before.
"""

from itertools import chain, islice

from engine.core.departures import Departures
from engine.core.drafting import Drafting, DraftRequest
from engine.core.drafts import NO_DRAFT, Draft
from engine.core.pdmux import Lane
from engine.core.plan import PlanItem, SlotOpen
from engine.core.plan_items import draft_items, open_slot, plan_item, request_drafts
from engine.core.preemption import Preemption
from engine.core.request import Request
from engine.core.state import SchedulerState


class DecodePlanner:
    def __init__(
        self, state: SchedulerState, departures: Departures, preemption: Preemption, *, drafting: Drafting
    ) -> None:
        self._drafting = drafting
        self._state = state
        self._memory = state.memory
        self._step_ends = state.step_ends
        self._stages = state.stages
        self._table = state.table
        self._micro_batches = state.micro_batches
        self._departures = departures
        self._preemption = preemption
        self._priorities = state.limits.priorities
        self._num_planned = 0
        self._awaits_tokens = False  # before drafting: drafts follow known tokens

    def ask(self) -> tuple[list[PlanItem], list[SlotOpen]]:
        """Plan a drafter step where drafts pay and are missing; if empty, decodes may follow."""
        self._awaits_tokens = False
        drafting = self._drafting
        if not drafting.passes:
            return [], []
        ready = self._micro_batches.ready(self._stages.running)
        if any(r.drafts.rows or r.drafts.is_asked for r in ready):
            return [], []
        in_flight = any(r.pending for r in ready)
        ask = drafting.ask(ready, rows=len(ready), overlaps=in_flight)
        self._awaits_tokens = bool(ask.passes) and in_flight
        if not ask.passes or in_flight:
            return [], []
        asked = [r for r in ready if r.rid in ask.passes][: self._step_ends.max_drafted]
        for request in asked:
            if self._memory.needs_page(request) and self._memory.available > len(ready):
                self._memory.grow(request)  # the decode step would
        passes = {r.rid: self._passes_in_room(ask, r, left_free=len(ready)) for r in asked}
        asked = self._with_slots([r for r in asked if passes[r.rid] > 0])
        opens = [open_slot(r, self._table) for r in asked if r.slot is None]
        return [request_drafts(r, passes[r.rid], topk=ask.topk) for r in asked], opens

    def _passes_in_room(self, ask: DraftRequest, request: Request, *, left_free: int) -> int:
        passes = ask.passes[request.rid]
        room = self._memory.make_room(request, ask.places(passes), left_free=left_free)
        return ask.passes_within(room, passes)

    def _with_slots(self, requests: list[Request]) -> list[Request]:
        """Requests with a row or a free one, which drafts take from no others."""
        rowless = [r.rid for r in requests if r.slot is None][self._table.num_free :]
        return [r for r in requests if r.rid not in rowless]

    def plan(self, planned: set[str], now_s: float) -> tuple[list[PlanItem], list[SlotOpen]]:
        """Plan a token per running request, without `planned`."""
        ready = self._micro_batches.ready(self._stages.running)
        if planned:
            ready = [r for r in ready if r.rid not in planned]
        if self._state.limits.multiplexed:
            ready = [r for r in ready if r.lane is not Lane.PREFILL or r.inflight == 0]
        drafts = dict[str, Draft]()
        if able := self._drafting.able(ready):
            if self._awaits_tokens or any(r.drafts.rows or r.drafts.is_asked for r in able):
                return [], []
            in_flight = any(r.pending for r in ready)
            drafts = self._drafting.choose(able, rows=len(ready), overlaps=in_flight)
            if drafts and (in_flight or (self._step_ends.one_verify_step and self._is_verifying())):
                return [], []
            drafts = dict(islice(drafts.items(), self._step_ends.max_drafted))
            for request in able:
                request.drafts.is_able = True
        ready = self._with_rows(ready, now_s)
        del ready[self._micro_batches.share(len(ready), num_running=len(self._stages.running)) :]
        self._grow(ready)
        if self._state.limits.test_retract:
            self._retract_sometimes(ready)
        if self._state.limits.max_loras_per_batch:
            ready.sort(key=lambda r: r.adapter)  # tokens of an adapter form one slice
        opens = [open_slot(r, self._table) for r in ready if r.slot is None or r.lane is Lane.PREFILL]
        for request in ready:
            end = request.launched_len + 1
            if draft := drafts.get(request.rid):
                most = self._step_ends.cut_answer(request, request.launched_len, end + len(draft)) - end
                room = self._memory.make_room(request, most, left_free=len(ready))
                drafts[request.rid] = draft.first(room)
                end += room
            self._memory.extend(request, end, answer=True)
        if drafts:
            return self._rows(ready, drafts), opens
        return [_row(r) for r in ready], opens

    def _is_verifying(self) -> bool:
        return any(r.drafts.rows for r in chain(self._stages.running, self._stages.draining))

    def _rows(self, ready: list[Request], drafts: dict[str, Draft]) -> list[PlanItem]:
        return [item for r in ready for item in (_row(r), *draft_items(r, drafts.get(r.rid, NO_DRAFT)))]

    def _with_rows(self, ready: list[Request], now_s: float) -> list[Request]:
        """Drop the least urgent rowless requests, if rows are short."""
        rowless = [r for r in ready if r.slot is None]
        if len(rowless) <= self._table.num_free:
            return ready
        rowless.sort(key=lambda r: -self._priorities.urgency(r, now_s))
        self._preemption.make_rows(rowless[self._table.num_free :])
        late = {r.rid for r in rowless[self._table.num_free :]}
        return [r for r in ready if r.rid not in late and r in self._stages.running]

    def _grow(self, ready: list[Request]) -> None:
        """Allocate pages for next tokens. If memory is short, retract the last in order.

        Victims in flight free memory at the next collect; those in need pause until then.
        """
        needy = sorted((r for r in ready if self._memory.needs_page(r)), key=self._retraction_order)
        counters = self._state.counters
        for i, request in enumerate(needy):
            while request in ready and not self._memory.grow(request):
                if self._stages.retraction_pending:
                    ready[:] = [r for r in ready if r not in needy[i:]]
                    return
                victim = max(self._stages.running, key=self._retraction_order)
                counters.out_of_memory += 1
                counters.out_of_memory_tokens += victim.launched_len
                self._departures.retract(victim)
                ready[:] = [r for r in ready if r is not victim]
                self._state.ratio.on_retraction(self._stages.running)

    def _retract_sometimes(self, ready: list[Request]) -> None:
        """Force a retraction (for tests)."""
        self._num_planned += bool(ready)
        if self._num_planned % self._state.limits.test_retract == 0 and len(ready) > 1:
            victim = max(ready, key=self._retraction_order)
            self._departures.retract(victim)
            ready.remove(victim)

    def _retraction_order(self, request: Request) -> tuple[int, int, int, str]:
        """By priority, longest output, shortest input; rid breaks ties."""
        rank = self._priorities.rank(request)
        return (-rank, len(request.output_ids), -len(request.input_ids), request.rid)


def _row(request: Request) -> PlanItem:
    return plan_item(request, request.launched_len, request.launched_len + 1, sample=True, extend=False)
