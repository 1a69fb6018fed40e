"""Rows of requests in a plan, and decode steps."""

from collections.abc import Callable

from engine.core.mem_cache.image_cache import with_images
from engine.core.outputs import input_logprob_part, note_launch
from engine.core.plan import ItemResult, Phase, Plan, PlanItem, SlotOpen
from engine.core.preemption import Preemption
from engine.core.request import Grammar, Request
from engine.core.results import Departures
from engine.core.state import RequestTable, SchedulerState, Stages, check_reads

# ---- Plan items of requests, their slots, and their allowed tokens.


def plan_item(request: Request, start: int, end: int, *, sample: bool, extend: bool) -> PlanItem:
    assert request.slot is not None
    known, windows = request.num_tokens, request.windows
    check_reads(request, start, end)
    hidden_from = note_launch(request, start, end)
    logprob_from, logprob_next = input_logprob_part(request, start, end)
    item = PlanItem(
        rid=request.rid,
        slot=request.slot,
        tokens=request.tokens(start, end) if start < known else [-(request.slot + 1)],
        start=start,
        page_start=request.num_synced_pages,
        new_pages=request.pages[request.num_synced_pages :],
        sample=sample,
        output_len=len(request.output_ids) + request.pending,
        extend=extend,
        logprobs=request.logprobs,
        logprob_from=logprob_from,
        logprob_next=logprob_next,
        hidden_from=hidden_from,
        pool=request.message.pooling,
        window_start=windows.num_synced,
        new_window=windows.pages[windows.num_synced :],
    )
    windows.num_synced = len(windows.pages)
    request.num_synced_pages = len(request.pages)
    request.launched_len = end
    request.inflight += 1
    request.pending += sample
    return with_images(item, request) if request.images else item


def open_slot(request: Request, table: RequestTable) -> SlotOpen:
    return SlotOpen(
        slot=table.open(request) if request.slot is None else table.reopen(request),
        sampling=request.sampling,
        prompt_ids=list(request.input_ids),
        output_ids=list(request.output_ids),
        eos_ids=tuple(sorted(request.eos_ids)),
        adapter=request.variant.number,
        state=request.recurrent.slot,
    )


class GrammarMasks:
    """Allowed tokens of a step's rows, from the grammars of requests."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def awaits_token(self, items: list[PlanItem]) -> bool:
        """Check if the mask of an item depends on a token in flight."""
        live = self._stages.live
        for item in items:
            request = live[item.rid]
            follows_known = item.behind or item.output_len == len(request.output_ids)
            if item.sample and request.grammar is not None and not follows_known:
                return True
        return False

    def fill(self, plan: Plan) -> None:
        live = self._stages.live
        grammar: Grammar | None = None
        for i, item in enumerate(plan.items):
            request = live[item.rid]
            if not item.sample or request.grammar is None or request.finish is not None:
                continue
            if item.behind:
                grammar = (grammar or request.grammar).fork()
                grammar.accept(item.tokens[0])
                plan.masks[i] = grammar.bitmask()
                continue
            grammar, known = None, len(request.output_ids)
            assert item.output_len == known, f"{request.rid}: a mask before the token it follows from"
            plan.masks[i] = request.grammar.bitmask()


# ---- One token per running request, limited by rows, pages and, with stages, an even share.

Items = tuple[list[PlanItem], list[SlotOpen]]  # of a step, and the rows that they open


class DecodePlanner:
    """Strategy of decode steps, here a token per request; speculative/decode_planning.py: more."""

    verifies = False  # True: rows may follow samples of their own step

    def __init__(self, state: SchedulerState, departures: Departures, preemption: Preemption) -> None:
        self._state = state
        self._memory = state.memory
        self._stages = state.stages
        self._table = state.table
        self._micro_batches = state.micro_batches
        self._departures = departures
        self._preemption = preemption
        self._priorities = state.limits.priorities
        self._num_planned = 0
        self.learners: list[Callable[[Plan, float], None]] = []  # from collected steps and their seconds

    # ---- plans

    def plan_first(self) -> Items:
        """Plan a step that goes before prompts and decodes, if any."""
        return [], []

    def plan(self, planned: set[str], now_s: float) -> Items:
        """Plan a token per running request, without `planned`."""
        ready = self._with_memory(self._ready(planned), now_s)
        opens = self._opens(ready)
        for request in ready:
            self._memory.extend(request, request.launched_len + 1, answer=True)
        return [decode_row(r) for r in ready], opens

    def _ready(self, planned: set[str]) -> list[Request]:
        ready = self._micro_batches.ready(self._stages.running)
        if planned:
            ready = [r for r in ready if r.rid not in planned]
        if self._state.limits.multiplexed:
            ready = [r for r in ready if r.phase is not Phase.PREFILL or r.inflight == 0]
        return ready

    def _with_memory(self, ready: list[Request], now_s: float) -> list[Request]:
        ready = self._with_rows(ready, now_s)
        del ready[self._micro_batches.share(len(ready), num_running=len(self._stages.running)) :]
        self._grow(ready)
        if self._state.limits.test_retract:
            self._retract_sometimes(ready)
        if self._state.limits.max_loras_per_batch:
            ready.sort(key=lambda r: r.variant.number)  # tokens of an adapter form one slice
        return ready

    def _opens(self, ready: list[Request]) -> list[SlotOpen]:
        return [open_slot(r, self._table) for r in ready if r.slot is None or r.phase is Phase.PREFILL]

    # ---- results

    def note(self, plan: Plan, taken_s: float) -> None:
        """Pass on the seconds of a collected step."""
        for learn in self.learners:
            learn(plan, taken_s)

    # ---- collected rows: results.py's RowRule

    def on_row(self, request: Request, item: PlanItem, result: ItemResult) -> None: ...

    def accepts(self, request: Request, item: PlanItem, number: int) -> bool:
        return True

    # ---- rows and pages

    def _with_rows(self, ready: list[Request], now_s: float) -> list[Request]:
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
        rank = self._priorities.rank(request)
        return (-rank, len(request.output_ids), -len(request.input_ids), request.rid)


def decode_row(request: Request) -> PlanItem:
    return plan_item(request, request.launched_len, request.launched_len + 1, sample=True, extend=False)
