"""Decode steps with drafts, which follow known tokens until their step verifies them.

Where drafts pay, decodes do not overlap: two half batches would read the weights twice. The
executor's drafter runs in a step before, which overlaps them (docs/design/scheduling.md).
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice

from engine.config import EngineConfig
from engine.core.decode_planning import DecodePlanner, Items, decode_row, open_slot
from engine.core.mem_cache.image_cache import with_images
from engine.core.mem_cache.memory_part import StepEnds
from engine.core.outputs import note_launch
from engine.core.plan import ItemResult, PlanItem
from engine.core.preemption import Preemption
from engine.core.request import Request
from engine.core.results import Departures
from engine.core.scheduler import MakeDecodeStrategy
from engine.core.state import SchedulerState
from engine.flags.resolve import drafts_overlap
from engine.flags.speculation import drafts_by_model, drafts_by_ngrams, may_draft, passes_of, rows_of_request, topk_of
from engine.speculative.drafting import Drafting, DraftRequest, fitting
from engine.speculative.drafts import (
    MODELED,
    NO_DRAFT,
    Draft,
    Drafts,
    count,
    draft_of,
    number_of,
    placeholder,
    rows_of,
)
from engine.speculative.ngram import NgramDrafter


class SpeculativeDecode(DecodePlanner):
    """Strategy of decode steps that verify drafts, chosen by `drafting`."""

    verifies = True

    def __init__(
        self,
        state: SchedulerState,
        departures: Departures,
        preemption: Preemption,
        *,
        drafting: Drafting,
        overlaps: bool = False,
    ) -> None:
        """`overlaps`: steps may be planned without the tokens and drafts of those before them."""
        super().__init__(state, departures, preemption)
        self.drafting = drafting
        self._overlaps = overlaps
        self._counters = state.counters
        self._step_ends = state.memory.of(StepEnds)
        self._awaits_tokens = False  # before drafting: drafts follow known tokens
        if drafting.for_all:
            self.learners.append(drafting.note)

    # ---- plans

    def plan_first(self) -> Items:
        """Plan a drafter step where drafts pay and are missing; if empty, decodes may follow."""
        self._awaits_tokens = False
        drafting = self.drafting
        if not drafting.passes:
            return [], []
        ready = self._micro_batches.ready(self._stages.running)
        behind = any(r.pending for r in ready)
        ahead = behind and self._overlaps and all(map(_needs_no_host, ready))
        if any(r.of(Drafts).is_asked or (_in_flight(r) and not ahead) for r in ready):
            return [], []
        ask = drafting.ask(ready, rows=len(ready), overlaps=behind and not ahead, ahead=ahead)
        self._awaits_tokens = bool(ask.passes) and behind and not ahead
        if not ask.passes or self._awaits_tokens:
            return [], []
        asked = [r for r in ready if r.rid in ask.passes][: self._step_ends.max_drafted]
        for request in asked:
            if self._memory.needs_page(request) and self._memory.available > len(ready):
                self._memory.grow(request)  # the decode step would
        passes = {r.rid: self._passes_in_room(ask, r, left_free=len(ready)) for r in asked}
        asked = self._with_slots([r for r in asked if passes[r.rid] > 0])
        opens = [open_slot(r, self._table) for r in asked if r.slot is None]
        self._counters.draft_steps += bool(asked)
        return [self._request_drafts(r, passes[r.rid], topk=ask.topk) for r in asked], opens

    def _request_drafts(self, request: Request, passes: int, *, topk: int) -> PlanItem:
        item = request_drafts(request, passes, topk=topk)
        if self._overlaps and topk == 1 and _needs_no_host(request):
            request.of(Drafts).unseen = passes
        return item

    def _passes_in_room(self, ask: DraftRequest, request: Request, *, left_free: int) -> int:
        passes = ask.passes[request.rid]
        room = self._memory.make_room(request, ask.places(passes), left_free=left_free)
        return ask.passes_within(room, passes)

    def _with_slots(self, requests: list[Request]) -> list[Request]:
        """Requests with a row or a free one, which drafts take from no others."""
        rowless = [r.rid for r in requests if r.slot is None][self._table.num_free :]
        return [r for r in requests if r.rid not in rowless]

    def plan(self, planned: set[str], now_s: float) -> Items:
        """Nothing where drafts await tokens."""
        ready, drafts = self._ready(planned), dict[str, Draft]()
        able = self.drafting.able(ready)
        if not self.drafting.for_all:
            self._learn_while_able(able)
        if able:
            if self._awaits_tokens or any(_in_flight(r) and not _awaits_drafts_alone(r) for r in able):
                return [], []
            overlaps = any(r.pending for r in ready)
            drafts = self._unseen(able)
            rows = len(ready) + sum(map(len, drafts.values()))
            drafts |= self.drafting.choose([r for r in able if r.rid not in drafts], rows=rows, overlaps=overlaps)
            if drafts and (overlaps or (self._step_ends.one_verify_step and self._is_verifying())):
                return [], []
            drafts = dict(islice(drafts.items(), self._step_ends.max_drafted))
            for request in able:
                request.of(Drafts).is_able = True
        ready = self._with_memory(ready, now_s)
        opens = self._opens(ready)
        for request in ready:
            end = request.launched_len + 1
            if draft := drafts.get(request.rid):
                most = self._step_ends.cut_answer(request, request.launched_len, end + len(draft)) - end
                room = self._memory.make_room(request, most, left_free=len(ready))
                drafts[request.rid] = draft.first(room)
                end += room
            self._memory.extend(request, end, answer=True)
        if not drafts:
            return [decode_row(r) for r in ready], opens
        return self._rows(ready, drafts), opens

    def _unseen(self, able: Sequence[Request]) -> dict[str, Draft]:
        """Return placeholders of the drafts that a step in flight makes."""
        found = dict[str, Draft]()
        for request in able:
            count, slot = min(request.of(Drafts).unseen, request.samples_left - 1), request.slot
            if request.of(Drafts).is_asked and count > 0:
                assert slot is not None, f"{request.rid}: its drafts are kept by slot"
                tokens = [placeholder(slot, number) for number in range(1, count + 1)]
                found[request.rid] = Draft(tokens, MODELED)
        return found

    def _learn_while_able(self, able: Sequence[Request]) -> None:
        """Measure steps while a request has drafts: others pay nothing."""
        if able:
            self.learners[:] = [self.drafting.note]
        elif self.learners and not any(r.parts for r in chain(self._stages.running, self._stages.draining)):
            self.learners.clear()

    def _is_verifying(self) -> bool:
        return any(r.of(Drafts).rows for r in chain(self._stages.running, self._stages.draining))

    def _rows(self, ready: list[Request], drafts: dict[str, Draft]) -> list[PlanItem]:
        runs = sum(1 for r in ready if drafts.get(r.rid))
        self._counters.verify_steps += runs > 0
        self._counters.verified_runs += runs
        return [item for r in ready for item in (decode_row(r), *draft_items(r, drafts.get(r.rid, NO_DRAFT)))]

    # ---- results

    def on_row(self, request: Request, item: PlanItem, result: ItemResult) -> None:
        if item.to_draft:
            self.drafting.note_tokens(request)
            take_drafts(request, item, result)
        elif item.draft:
            request.of(Drafts).rows -= 1

    def accepts(self, request: Request, item: PlanItem, number: int) -> bool:
        drafts = request.of(Drafts)
        if not item.draft:
            drafts.last = number
            if drafts.is_able and item.sample and not item.extend and request.finish is None:
                count(request, steps=1)
            return True
        self._counters.drafts += 1
        if not _was_right(request, item, number):
            self._counters.wrong_drafts += request.finish is None and request.num_tokens == item.kv_len
            take_back(request)
            self._step_ends.reject(request, item.kv_len)
            return False
        count(request, accepted=1)
        self._counters.accepted_drafts += 1
        drafts.last, request.computed_len = number, max(request.computed_len, item.kv_len)
        take_back(request)
        return True


def _in_flight(request: Request) -> bool:
    drafts = request.of(Drafts)
    return drafts.rows > 0 or drafts.is_asked


def _awaits_drafts_alone(request: Request) -> bool:
    """Check for drafts in flight that may be verified, and no samples."""
    return request.pending == 0 and request.of(Drafts).unseen > 0


def _needs_no_host(request: Request) -> bool:
    """Check that drafts need no tokens before them on the host."""
    return request.grammar is None and not request.images and not request.sampling.penalized


def draft_items(request: Request, draft: Draft) -> list[PlanItem]:
    """Plan a row per draft token after the last known one."""
    assert request.slot is not None
    known, output_len = request.launched_len - 1, len(request.output_ids) + request.pending - 1
    items = [
        PlanItem(
            rid=request.rid,
            slot=request.slot,
            tokens=[row.token],
            start=(start := known + row.depth),
            page_start=request.num_synced_pages,
            new_pages=[],
            sample=True,
            output_len=output_len + row.depth,
            extend=False,
            logprobs=request.logprobs,
            hidden_from=note_launch(request, start, start + 1),
            window_start=request.windows.num_synced,
            behind=row.behind,
            place=-1 if row.place == row.depth else known + row.place,
        )
        for row in rows_of(draft)
    ]
    request.launched_len += len(items)
    request.inflight += len(items)
    request.pending += len(items)
    request.of(Drafts).rows += len(items)
    count(request, drafted=len(items))
    return [with_images(item, request) for item in items] if request.images else items


def request_drafts(request: Request, passes: int, *, topk: int) -> PlanItem:
    """Plan passes after the newest token, be it in flight."""
    drafts, slot = request.of(Drafts), request.slot
    assert slot is not None and request.launched_len == request.num_tokens - 1 + request.pending, request.rid
    tokens = request.tokens(request.launched_len, request.num_tokens)
    if drafts.rows:
        tokens = [placeholder(slot, 0)]
    elif request.pending:
        tokens = [-(slot + 1)]
    known = request.pending - drafts.rows  # at least, when the step runs
    item = PlanItem(
        rid=request.rid,
        slot=slot,
        tokens=tokens,
        start=request.launched_len - drafts.rows,
        page_start=request.num_synced_pages,
        new_pages=request.pages[request.num_synced_pages :],
        sample=False,
        output_len=len(request.output_ids) + known,
        extend=False,
        window_start=request.windows.num_synced,
        to_draft=passes,
        topk=topk,
        unverified=drafts.rows,
    )
    request.num_synced_pages = len(request.pages)
    request.inflight += 1
    drafts.asked_at, drafts.is_asked, drafts.unseen = request.num_tokens + known, True, 0
    return with_images(item, request) if request.images else item


def take_drafts(request: Request, item: PlanItem, result: ItemResult) -> None:
    """Take the drafter's draft; after a failed step decode without one."""
    drafts = request.of(Drafts)
    drafts.is_asked = False
    if request.finish is not None or not item.kv_len <= request.num_tokens <= item.kv_len + item.unverified:
        return
    draft, grammar = draft_of(result.drafted), request.grammar
    if not _may_branch(request):
        draft = draft.path()
    drafts.draft = draft if grammar is None else draft.first(len(fitting(grammar, draft.tokens)))


def take_back(request: Request) -> None:
    """Compute again from the newest token, with the sampled one."""
    request.launched_len = request.unsent.hidden_launched = request.computed_len


def _may_branch(request: Request) -> bool:
    """Check that tree rows equal chain rows: masks, counts and hidden states follow one path."""
    return request.grammar is None and not request.sampling.penalized and not request.message.return_hidden_states


def _was_right(request: Request, item: PlanItem, number: int) -> bool:
    """Check that the draft path up to item `number` was sampled."""
    follows = request.finish is None and request.of(Drafts).last == number - item.behind
    if not follows or request.num_tokens != item.kv_len:
        return False
    token = item.tokens[0]
    if token < 0:  # the drafter's step has ended since
        at, draft = number_of(token) - 1, request.of(Drafts).draft.tokens
        return at < len(draft) and request.output_ids[-1] == draft[at]
    return request.output_ids[-1] == token


def decode_strategy(config: EngineConfig) -> MakeDecodeStrategy:
    """The strategy of decode steps: with drafts by flag, or for what grammars force."""
    if not may_draft(config):
        return DecodePlanner
    most = rows_of_request(config) - 1
    drafting = Drafting(
        NgramDrafter(most=most) if drafts_by_ngrams(config) else None,
        most=most,
        passes=passes_of(config) if drafts_by_model(config) else 0,
        topk=topk_of(config),
        counts=config.device == "cpu",
    )
    return partial(SpeculativeDecode, drafting=drafting, overlaps=drafts_overlap(config))
